"""The server's link to one engine process: starts it, exchanges messages with it, ends it.

EngineLink ──PUSH ipc──> engine process        a `Channel`: two sockets, here in the engine's private folder
           <──PULL ipc──
           <──InFlightStep, a mapped file──
"""

import asyncio
import contextlib
import signal
from collections import deque
from dataclasses import replace
from typing import Protocol

import msgspec
import zmq

from penstock.config.engine_config import EngineConfig
from penstock.engine import protocol
from penstock.engine.in_flight import InFlightStep
from penstock.engine.protocol import Failed, FromEngine, Launch, Ready, Shutdown, ToEngine, local_address
from penstock.fleet.engine_process import KILL_SECONDS, EngineProcess
from penstock.system.host import UNBOUND, CpuBinding

ENGINE_CORE = "penstock.engine.build:build"
_POLLIN = int(zmq.POLLIN)  # arithmetic of plain numbers takes a tenth of that of flags
MAX_TAKEN = 8
"""Messages taken from the socket at a time, so that the event loop has its turn in between."""
LAST_OUTPUTS_MS = 100
"""Milliseconds to wait for outputs of an engine that has exited; outputs that arrive later are recomputed."""


class StepInFlight(Protocol):
    """The step that an engine is computing, or was when it died."""

    def num_tokens(self) -> int: ...

    def request_indices(self) -> list[int] | None: ...


class Link(Protocol):
    """An engine process on any machine, for its replica. Creating a link starts the process."""

    @property
    def was_stopped(self) -> bool:
        """Whether the process was found stopped (SIGSTOP), and was killed for that."""

    @property
    def was_lost(self) -> bool:
        """Whether its machine, or the connection to it, was lost, so that nothing is known of its end."""

    @property
    def pid(self) -> int:
        """Process id of the engine on its machine, also after its end; 0 while it has no machine."""

    @property
    def node(self) -> str:
        """The machine that it runs on; empty for this machine, and before it is placed."""

    @property
    def in_flight(self) -> StepInFlight: ...

    def again(self, model: str | None = None, revision: str | None = None) -> "Link":
        """Make a link to a new engine with the same configuration and binding, optionally with another model."""

    async def placed(self) -> None:
        """Wait until the engine is placed on a machine, or has ended: then see `exited`."""

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks; messages to a dead engine are lost."""

    async def receive(self) -> FromEngine:
        """Wait, without a limit, for the engine's next message."""

    async def receive_rest(self) -> list[FromEngine]:
        """Take the messages that are still queued from an engine that has exited."""

    def last_words(self) -> Failed | None:
        """Why an engine that has exited failed, if it left a message."""

    async def exited(self) -> int:
        """Wait for the process to end; returns its exit code, negative for a signal."""

    def kill(self) -> None:
        """Kill the process."""

    async def close(self, grace: float) -> None:
        """Ask the engine to exit, kill it after `grace` seconds, and free all resources."""

    def destroy(self) -> None:
        """Kill the process and free all resources; idempotent."""


class Channel:
    """The server's two sockets to one engine.

    The event loop watches the file descriptor of `outputs` itself: `zmq.asyncio` would make a future, a timer and four
    look-ups of flags for each message, a fifth of the time that a token costs this process.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.outputs = context.socket(zmq.PULL)
        self.requests = context.socket(zmq.PUSH)
        # Without limits: the engine must not block on a server that is busy, nor the server on an engine that loads.
        self.outputs.set_hwm(0)
        self.requests.set_hwm(0)
        self._frames: deque[bytes] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._reader: asyncio.Future[None] | None = None

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks; messages to a dead engine are lost."""
        with contextlib.suppress(zmq.Again):  # the queue has no limit, so this means that no engine is connected
            self.requests.send(protocol.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        """Wait, without a limit, for the engine's next message."""
        while not self._frames:
            if self._loop is None:
                self._watch()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return protocol.decode_from_engine(self._frames.popleft())

    def _watch(self) -> None:
        """Have the event loop call `_take` from now on."""
        self._loop, self._descriptor = asyncio.get_running_loop(), int(self.outputs.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._take)
        self._loop.call_soon(self._take)  # for messages that came before: the descriptor is edge-triggered

    def _take(self) -> None:
        """Receive all queued messages: the descriptor is edge-triggered, and not readable again for a rest."""
        if self._loop is None:  # closed
            return
        while int(self.outputs.getsockopt(zmq.EVENTS)) & _POLLIN:
            self._frames.append(self.outputs.recv(zmq.NOBLOCK))
            # Other callbacks of the event loop get their turn between.
            if len(self._frames) >= MAX_TAKEN:
                self._loop.call_soon(self._take)
                break
        if self._frames and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def receive_rest(self) -> list[FromEngine]:
        """Take the messages that are still queued from an engine that has exited."""
        rest = []
        with contextlib.suppress(asyncio.TimeoutError):
            while True:
                rest.append(await asyncio.wait_for(self.receive(), LAST_OUTPUTS_MS / 1000))
        return rest

    def close(self) -> None:
        """Close the sockets and drop queued messages; idempotent."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._loop = None
        for end in (self.requests, self.outputs):
            end.close(linger=0)


class EngineLink:
    """A link to an engine process on this machine, which the constructor starts without waiting for it.

    `core` names the function that builds the engine; nothing of the engine is imported here. Create it in the main
    thread: the engine dies with the thread that started it.
    """

    node = ""
    was_lost = False
    """Whether the process outlived its kill by `KILL_SECONDS`."""

    def __init__(self, config: EngineConfig, core: str = ENGINE_CORE, binding: CpuBinding = UNBOUND) -> None:
        """
        Args:
            binding: the cores and memory of this machine that the engine uses.

        Raises:
            ConfigError: there is no room for the folder.
            EngineDeadError: the process cannot be started.
        """
        self._config, self._core, self._binding = config, core, binding
        self._process = EngineProcess(lambda folder: Launch(config, core, folder, binding))
        self._exit_code: asyncio.Future[int] | None = None
        self._context = zmq.Context()
        self._channel = Channel(self._context)
        # This side binds, as it is up first: the engine connects when its imports are done.
        self._channel.outputs.bind(local_address(self.folder, "outputs"))
        self._channel.requests.bind(local_address(self.folder, "requests"))

    def again(self, model: str | None = None, revision: str | None = None) -> "EngineLink":
        """Make a link to a new engine with the same configuration and binding, optionally with another model."""
        return EngineLink(with_model(self._config, model, revision), self._core, self._binding)

    @property
    def pid(self) -> int:
        """Process id of the engine, also after its end."""
        return self._process.pid

    @property
    def folder(self) -> str:
        """The engine's private folder, which is removed once everything in it is open."""
        return self._process.folder

    @property
    def in_flight(self) -> InFlightStep:
        return self._process.in_flight

    @property
    def was_stopped(self) -> bool:
        return self._process.was_stopped

    async def placed(self) -> None:
        """Return at once: the engine runs on this machine."""

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks; messages to a dead engine are lost."""
        self._channel.send(message)

    async def receive(self) -> FromEngine:
        """Wait, without a limit, for the engine's next message."""
        message = await self._channel.receive()
        if isinstance(message, Ready):
            self._process.remove_folder()
        return message

    async def receive_rest(self) -> list[FromEngine]:
        """Take the messages that are still queued from an engine that has exited."""
        return await self._channel.receive_rest()

    def last_words(self) -> Failed | None:
        """Why an engine that has exited failed, if it left a message."""
        return words_of(self.in_flight.last_words())

    async def exited(self) -> int:
        """Wait for the process to end; returns its exit code, negative for a signal. A stopped process is killed."""
        if self._exit_code is None:
            loop = asyncio.get_running_loop()
            self._exit_code = exit_code = loop.create_future()

            def ended(code: int) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits for the result
                    loop.call_soon_threadsafe(_set_if_open, exit_code, code)

            self._process.watch(ended)
        return await asyncio.shield(self._exit_code)

    def kill(self) -> None:
        """Kill the process. `exited` waits at most `KILL_SECONDS` for its end."""
        self._process.kill()
        if self._exit_code is not None and not self._exit_code.done():
            asyncio.get_running_loop().call_later(KILL_SECONDS, self._give_up, self._exit_code)

    def _give_up(self, exit_code: "asyncio.Future[int]") -> None:
        if not exit_code.done():
            self.was_lost = True
            exit_code.set_result(-signal.SIGKILL)

    async def close(self, grace: float) -> None:
        """Ask the engine to exit, kill it after `grace` seconds, and free all resources."""
        if self._process.runs:
            self.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.exited(), grace)
        self.destroy()

    def destroy(self) -> None:
        """Kill the process and free all resources; idempotent."""
        self._process.kill()
        self._channel.close()
        self._context.term()
        self._process.destroy(0.0 if self.was_lost else KILL_SECONDS)


def _set_if_open(future: "asyncio.Future[int]", result: int) -> None:
    if not future.done():
        future.set_result(result)


def with_model(config: EngineConfig, model: str | None, revision: str | None = None) -> EngineConfig:
    """The configuration with another model, or another revision of its own; both None: unchanged."""
    if model is None and revision is None:
        return config
    return replace(config, model=replace(config.model, model=model or config.model.model, revision=revision))


def words_of(words: bytes) -> Failed | None:
    """Read the failure that an engine left in its in-flight file; None if there is none, or a truncated one."""
    try:
        return protocol.decode_failed(words) if words else None
    except msgspec.MsgspecError:  # the engine was killed while writing
        return None


def describe_exit(code: int) -> str:
    """Describe a process's exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
