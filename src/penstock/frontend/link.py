"""One engine process as the server sees it: started, talked to, ended. `EngineLink` is one of this machine.

EngineLink ──PUSH ipc──> engine process        sockets and the in-flight file lie in a private folder, which is removed
           <──PULL ipc──                       when both ends have opened them, so that no death leaves it behind
           <──InFlightStep, a mapped file──
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from penstock.config import EngineConfig
from penstock.engine import protocol
from penstock.engine.in_flight import InFlightStep
from penstock.engine.protocol import Failed, FromEngine, Launch, Ready, Shutdown, ToEngine, in_flight_file
from penstock.errors import ConfigError, EngineDeadError
from penstock.host import ANYWHERE, Seat

ENGINE_CORE = "penstock.engine.build:build"
LAST_OUTPUTS_MS = 100
"""How long to wait for outputs of an engine that has exited; later ones are recomputed."""
MEMORY_FOLDER = "/dev/shm"


class StepInFlight(Protocol):
    """What is known of the step that an engine computes, also after its death."""

    def num_tokens(self) -> int: ...

    def request_indices(self) -> list[int] | None: ...


class Link(Protocol):
    """An engine process wherever it runs, as its supervisor needs it. Made, it starts; `again` makes the next one."""

    was_stopped: bool
    """Whether it was found stopped, and ended for that."""

    @property
    def pid(self) -> int:
        """Process id of the engine, also after its end."""

    @property
    def in_flight(self) -> StepInFlight: ...

    def again(self, model: str | None = None) -> "Link":
        """A link to a new engine at the same place, of the same configuration, perhaps with another model."""

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


class EngineLink:
    """Starts an engine process at once, without waiting for it; asynchronous from then on.

    `core` names the function that builds what runs in it. Nothing of the engine is imported here. To be made in the
    main thread: the engine dies with the thread that started it.
    """

    def __init__(self, config: EngineConfig, core: str = ENGINE_CORE, seat: Seat = ANYWHERE) -> None:
        """
        Args:
            seat: where on this machine it runs.

        Raises:
            ConfigError: there is no room for the folder.
            EngineDeadError: the process cannot be started.
        """
        self.folder, self.in_flight = _make_folder()
        self._launch = launch = Launch(config, core, self.folder, seat)
        self.was_stopped = False
        self._exit_code: asyncio.Future[int] | None = None
        try:
            self._process = self._start(launch)
        except OSError as error:
            self.in_flight.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise EngineDeadError(f"the engine's process cannot be started: {error.strerror}") from error
        self._context = zmq.asyncio.Context()
        self._outputs: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
        self._requests: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUSH)
        self._outputs.set_hwm(0)
        self._requests.set_hwm(0)
        self._outputs.bind(launch.outputs)
        self._requests.bind(launch.requests)

    @staticmethod
    def _start(launch: Launch) -> "subprocess.Popen[bytes]":
        # The engine imports from where this process does. Its own session keeps the terminal's Ctrl-C from it,
        # and the pipe to its standard input, open as long as this process lives, tells it when we are gone.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.process"],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed already: `exited` reports it
            process.stdin.write(protocol.encode_launch(launch) + b"\n")
        return process

    def again(self, model: str | None = None) -> "EngineLink":
        """A link to a new engine in the same seat, of the same configuration, perhaps with another model."""
        config = self._launch.config
        if model is not None:
            config = replace(config, model=replace(config.model, model=model))
        return EngineLink(config, self._launch.core, self._launch.seat)

    @property
    def pid(self) -> int:
        """Process id of the engine, also after its end."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message; it never blocks, and what is sent to a dead engine is lost."""
        with contextlib.suppress(zmq.Again):  # without a limit on the queue, this means that there is no engine
            self._requests.send(protocol.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        """The engine's next message, however long that takes."""
        frame: bytes = await self._outputs.recv()
        message = protocol.decode_from_engine(frame)
        if isinstance(message, Ready):
            shutil.rmtree(self.folder, ignore_errors=True)
        return message

    async def receive_rest(self) -> list[FromEngine]:
        """Messages still queued from an engine that has exited."""
        rest = []
        while await self._outputs.poll(LAST_OUTPUTS_MS):
            rest.append(await self.receive())
        return rest

    def last_words(self) -> Failed | None:
        """Why an engine that has exited failed, if it could still say so."""
        words = self.in_flight.last_words()
        try:
            return protocol.decode_failed(words) if words else None
        except msgspec.MsgspecError:  # it was killed while it wrote them
            return None

    async def exited(self) -> int:
        """Wait for the process to end; its exit code, negative for a signal. One that is stopped is ended."""
        if self._exit_code is None:
            loop = asyncio.get_running_loop()
            self._exit_code = exit_code = loop.create_future()

            def watch() -> None:
                code = self._wait()
                with contextlib.suppress(RuntimeError):  # the loop is closed: the result is not needed
                    loop.call_soon_threadsafe(exit_code.set_result, code)

            threading.Thread(target=watch, name="engine-watch", daemon=True).start()
        return await asyncio.shield(self._exit_code)

    def _wait(self) -> int:
        with contextlib.suppress(ChildProcessError):  # it was waited for already
            change = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            if change is not None and change.si_code == os.CLD_STOPPED:
                self.was_stopped = True
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        """End the process at once."""
        if self._process.poll() is None:
            self._process.kill()

    async def close(self, grace: float) -> None:
        """Ask the engine to exit, insist after `grace` seconds, and leave nothing behind."""
        if self._process.poll() is None:
            self.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.exited(), grace)
        self.destroy()

    def destroy(self) -> None:
        """End the process at once and leave nothing behind; idempotent."""
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        for end in (self._requests, self._outputs):
            end.close(linger=0)
        self._context.term()
        self.in_flight.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _make_folder() -> tuple[str, InFlightStep]:
    """A private folder with an in-flight file in it; in memory if the disk with the temporary files is full.

    Raises:
        ConfigError: there is room in neither place.
    """
    try:
        return _make_folder_in(tempfile.gettempdir())
    except OSError as error:
        on_disk = error
    try:
        return _make_folder_in(MEMORY_FOLDER)
    except OSError as in_memory:
        raise ConfigError(
            f"there is no room for a folder with the engine's sockets: {on_disk}; {in_memory}. Free some space in one "
            "of the two places, or set TMPDIR to a folder that has some"
        ) from in_memory


def _make_folder_in(parent: str) -> tuple[str, InFlightStep]:
    folder = tempfile.mkdtemp(prefix="penstock-", dir=parent)
    try:
        return folder, InFlightStep(in_flight_file(folder))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
