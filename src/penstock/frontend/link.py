"""One engine process as the server sees it: started, talked to, ended. `EngineLink` is one of this machine.

EngineLink ──PUSH ipc──> engine process        a `Channel`: two sockets, here in the engine's private folder
           <──PULL ipc──
           <──InFlightStep, a mapped file──
"""

import asyncio
import contextlib
import signal
from dataclasses import replace
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from penstock.config import EngineConfig
from penstock.engine import protocol
from penstock.engine.in_flight import InFlightStep
from penstock.engine.protocol import Failed, FromEngine, Launch, Ready, Shutdown, ToEngine, local_address
from penstock.frontend.engine_process import EngineProcess
from penstock.host import ANYWHERE, Seat

ENGINE_CORE = "penstock.engine.build:build"
LAST_OUTPUTS_MS = 100
"""How long to wait for outputs of an engine that has exited; later ones are recomputed."""


class StepInFlight(Protocol):
    """What is known of the step that an engine computes, also after its death."""

    def num_tokens(self) -> int: ...

    def request_indices(self) -> list[int] | None: ...


class Link(Protocol):
    """An engine process wherever it runs, as its supervisor needs it. Made, it starts; `again` makes the next one."""

    @property
    def was_stopped(self) -> bool:
        """Whether it was found stopped, and ended for that."""

    @property
    def was_lost(self) -> bool:
        """Whether its machine is gone, or the way to it, so that nothing is known of its end."""

    @property
    def pid(self) -> int:
        """Process id of the engine on its machine, also after its end; 0 while it has no machine."""

    @property
    def node(self) -> str:
        """The machine that it runs on; empty for this one, and while it has none."""

    @property
    def in_flight(self) -> StepInFlight: ...

    def again(self, model: str | None = None) -> "Link":
        """A link to a new engine at the same place, of the same configuration, perhaps with another model."""

    async def placed(self) -> None:
        """Wait until the engine has a machine to start on, or has none to wait for any more: see `exited` then."""

    def send(self, message: ToEngine) -> None:
        """Queue a message; it never blocks, and what is sent to a dead engine is lost."""

    async def receive(self) -> FromEngine:
        """The engine's next message, however long that takes."""

    async def receive_rest(self) -> list[FromEngine]:
        """Messages still queued from an engine that has exited."""

    def last_words(self) -> Failed | None:
        """Why an engine that has exited failed, if it could still say so."""

    async def exited(self) -> int:
        """Wait for the process to end; its exit code, negative for a signal."""

    def kill(self) -> None:
        """End the process at once."""

    async def close(self, grace: float) -> None:
        """Ask the engine to exit, insist after `grace` seconds, and leave nothing behind."""

    def destroy(self) -> None:
        """End the process at once and leave nothing behind; idempotent."""


class Channel:
    """The two sockets over which a server talks to one engine."""

    def __init__(self, context: "zmq.asyncio.Context") -> None:
        self.outputs: zmq.asyncio.Socket = context.socket(zmq.PULL)
        self.requests: zmq.Socket[bytes] = zmq.Context(context).socket(zmq.PUSH)
        self.outputs.set_hwm(0)
        self.requests.set_hwm(0)

    def send(self, message: ToEngine) -> None:
        """Queue a message; it never blocks, and what is sent to a dead engine is lost."""
        with contextlib.suppress(zmq.Again):  # without a limit on the queue, this means that there is no engine
            self.requests.send(protocol.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        """The engine's next message, however long that takes."""
        frame: bytes = await self.outputs.recv()
        return protocol.decode_from_engine(frame)

    async def receive_rest(self) -> list[FromEngine]:
        """Messages still queued from an engine that has exited."""
        rest = []
        while await self.outputs.poll(LAST_OUTPUTS_MS):
            rest.append(await self.receive())
        return rest

    def close(self) -> None:
        """Forget what is queued; idempotent."""
        for end in (self.requests, self.outputs):
            end.close(linger=0)


class EngineLink:
    """Starts an engine process at once, without waiting for it; asynchronous from then on.

    `core` names the function that builds what runs in it. Nothing of the engine is imported here. To be made in the
    main thread: the engine dies with the thread that started it.
    """

    node = ""
    was_lost = False

    def __init__(self, config: EngineConfig, core: str = ENGINE_CORE, seat: Seat = ANYWHERE) -> None:
        """
        Args:
            seat: where on this machine it runs.

        Raises:
            ConfigError: there is no room for the folder.
            EngineDeadError: the process cannot be started.
        """
        self._config, self._core, self._seat = config, core, seat
        self._process = EngineProcess(lambda folder: Launch(config, core, folder, seat))
        self._exit_code: asyncio.Future[int] | None = None
        self._context = zmq.asyncio.Context()
        self._channel = Channel(self._context)
        self._channel.outputs.bind(local_address(self.folder, "outputs"))
        self._channel.requests.bind(local_address(self.folder, "requests"))

    def again(self, model: str | None = None) -> "EngineLink":
        """A link to a new engine in the same seat, of the same configuration, perhaps with another model."""
        return EngineLink(with_model(self._config, model), self._core, self._seat)

    @property
    def pid(self) -> int:
        """Process id of the engine, also after its end."""
        return self._process.pid

    @property
    def folder(self) -> str:
        """The engine's private folder, which is removed when all that lies in it is open."""
        return self._process.folder

    @property
    def in_flight(self) -> InFlightStep:
        return self._process.in_flight

    @property
    def was_stopped(self) -> bool:
        return self._process.was_stopped

    async def placed(self) -> None:
        """This machine is there."""

    def send(self, message: ToEngine) -> None:
        """Queue a message; it never blocks, and what is sent to a dead engine is lost."""
        self._channel.send(message)

    async def receive(self) -> FromEngine:
        """The engine's next message, however long that takes."""
        message = await self._channel.receive()
        if isinstance(message, Ready):
            self._process.remove_folder()
        return message

    async def receive_rest(self) -> list[FromEngine]:
        """Messages still queued from an engine that has exited."""
        return await self._channel.receive_rest()

    def last_words(self) -> Failed | None:
        """Why an engine that has exited failed, if it could still say so."""
        return words_of(self.in_flight.last_words())

    async def exited(self) -> int:
        """Wait for the process to end; its exit code, negative for a signal. One that is stopped is ended."""
        if self._exit_code is None:
            loop = asyncio.get_running_loop()
            self._exit_code = exit_code = loop.create_future()

            def ended(code: int) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the result is not needed
                    loop.call_soon_threadsafe(exit_code.set_result, code)

            self._process.watch(ended)
        return await asyncio.shield(self._exit_code)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    async def close(self, grace: float) -> None:
        """Ask the engine to exit, insist after `grace` seconds, and leave nothing behind."""
        if self._process.runs:
            self.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.exited(), grace)
        self.destroy()

    def destroy(self) -> None:
        """End the process at once and leave nothing behind; idempotent."""
        self._process.kill()
        self._channel.close()
        self._context.term()
        self._process.destroy()


def with_model(config: EngineConfig, model: str | None) -> EngineConfig:
    """The same configuration with another model; None: with the same."""
    return config if model is None else replace(config, model=replace(config.model, model=model))


def words_of(words: bytes) -> Failed | None:
    """What an engine left in its in-flight file when it failed; None if that is nothing, or was cut short."""
    try:
        return protocol.decode_failed(words) if words else None
    except msgspec.MsgspecError:  # it was killed while it wrote them
        return None


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
