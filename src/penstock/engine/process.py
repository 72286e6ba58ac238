"""The engine process: one synchronous loop around an engine core.

    messages in ──> core.add_request / finish_request ──> core.step ──> one message out ──> again

It never blocks: it takes the messages that have arrived, and ZeroMQ's own thread queues outputs without a limit; it
sleeps on the socket only when there is no work. It ends on `Shutdown`, on an error of its own, or with its parent
process: the end of its standard input reveals that, and once it is ready the kernel also kills it.
"""

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import zmq

from penstock.api.request import BlockSource, FinishReason, Request, Resumed, SequenceOutput
from penstock.config.engine_config import EngineConfig
from penstock.engine import protocol, startup
from penstock.engine.in_flight import InFlightStep
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.engine.protocol import (
    Add,
    Expire,
    Failed,
    Finish,
    FromEngine,
    HandedOver,
    HandOver,
    Launch,
    Loading,
    Ping,
    Pong,
    Ready,
    Shutdown,
    StepOutputs,
)
from penstock.errors import ConfigError, DeviceLostError
from penstock.system.host import end_process, read_first_line
from penstock.system.loading_progress import NUM_BYTES, SHOWN_INTERVAL, TOTAL_BYTES, Intervals, progress_to
from penstock.system.parent import die_with_parent
from penstock.system.start import Start

logger = logging.getLogger("penstock.engine")

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

MAX_MESSAGE = 8000
"""Maximum characters of an error message to the server."""
TEND_MS = 20
"""Interval at which an idle engine checks for completed writes."""
FAREWELL_MS = 2000
"""Maximum time for the last messages to be sent when the process ends."""


class Core(Protocol):
    """An engine core that the loop drives; `penstock.engine.core.EngineCore` in production."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def last_step(self) -> StepRecord | None: ...
    @property
    def is_loading(self) -> bool: ...
    def add_request(self, request: Request, resumed: Resumed, source: BlockSource | None) -> None: ...
    def hand_over(self, request_id: str) -> None: ...
    def drain_handovers(self) -> Sequence[tuple[str, BlockSource | None]]: ...
    def finish_request(self, request_id: str, index: int | None, reason: FinishReason) -> None: ...
    def expire(self, request_id: str) -> None: ...
    def step(self, begin: Callable[[int, Sequence[int]], None]) -> Sequence[SequenceOutput]: ...
    @property
    def is_writing(self) -> bool: ...
    def poll_transfers(self) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class EngineLoop:
    """Moves messages into a core and its outputs out."""

    def __init__(
        self, core: Core, requests: "zmq.Socket[bytes]", outputs: "zmq.Socket[bytes]", in_flight: InFlightStep
    ) -> None:
        self._core = core
        self._in_flight = in_flight
        self._requests = requests
        self._outputs = outputs
        self._stopped = False

    def run(self) -> None:
        """Step while there is work and sleep otherwise, until `Shutdown` arrives."""
        while not self._stopped:
            if self._core.has_work:
                self._take_waiting()  # all of them: an abort, or a new request, counts from this step on
                self._step()
            # Threads write blocks while nothing runs: an idle engine looks after them between messages.
            elif self._core.is_writing and not self._requests.poll(TEND_MS):
                self._core.poll_transfers()
                if not self._core.is_writing:  # report the writes' counters, as no step's message will
                    _send(self._outputs, Pong(self._core.stats()))
            else:
                self._handle(self._requests.recv())
            for request_id, source in self._core.drain_handovers():
                _send(self._outputs, HandedOver(request_id, source, self._core.stats()))

    def _take_waiting(self) -> None:
        with contextlib.suppress(zmq.Again):
            while not self._stopped:
                self._handle(self._requests.recv(zmq.NOBLOCK))

    def _step(self) -> None:
        if not self._stopped and self._core.has_work:
            outputs = self._core.step(self._in_flight.begin_step)
            self._in_flight.end_step()
            if not outputs and self._core.last_step is None and self._core.is_loading:
                return  # waiting for a hanging file must not count as progress
            _send(self._outputs, StepOutputs(list(outputs), self._core.stats(), self._core.last_step))

    def _handle(self, frame: bytes) -> None:
        message = protocol.decode_to_engine(frame)
        if isinstance(message, Add):
            self._core.add_request(message.request, message.resumed, message.source)
        elif isinstance(message, Finish):
            self._core.finish_request(message.request_id, message.index, message.reason)
        elif isinstance(message, HandOver):
            self._core.hand_over(message.request_id)
        elif isinstance(message, Expire):
            self._core.expire(message.request_id)
        elif isinstance(message, Ping):
            _send(self._outputs, Pong(self._core.stats()))
        else:
            assert isinstance(message, Shutdown)
            self._stopped = True


def run_engine(launch: Launch) -> int:
    """Build the core, run the loop until shutdown, and return the exit code."""
    context = zmq.Context()
    requests, outputs = _connect(context, launch)
    in_flight = InFlightStep(launch.in_flight)
    if launch.remote is not None:
        shutil.rmtree(launch.folder, ignore_errors=True)  # its parent has the file open
    try:
        launch.binding.apply()
    except OSError as error:  # a container may forbid it; the engine is then only slower
        logger.warning("the engine cannot be bound to %s: %s", launch.binding, error)
    try:
        with (
            progress_to(Intervals(lambda record: _tell_progress(outputs, record), seconds=SHOWN_INTERVAL)),
            startup.starting(launch.config) as start,
        ):
            core = _load(launch.core)(launch.config, start)
        gc.freeze()  # collections of the loop need not scan what was imported and loaded
        # Without the second of `_die_soon_after_parent`: both ends have opened the sockets, whose folder is gone.
        die_with_parent()
        _send(outputs, Ready(core.info))
        try:
            EngineLoop(core, requests, outputs, in_flight).run()
        except Exception:
            with contextlib.suppress(Exception):  # freeing memory may fail, too, if the device is lost
                core.close()
            raise
        core.close()
        return 0
    except ConfigError as error:
        _fail(in_flight, str(error), mistake=True)
        return 1
    except Exception as error:
        if isinstance(error, DeviceLostError) and error.__cause__ is None:  # another rank has ended
            logger.critical("the engine ends: %s", error)
        else:
            traceback.print_exc()
        _fail(in_flight, f"{type(error).__name__}: {error}", mistake=False)
        return 1
    finally:
        # The last outputs clear requests of blame, so they get time to leave.
        context.destroy(linger=FAREWELL_MS)


def _connect(context: Context, launch: Launch) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """Sockets for messages in and out; over a network one encrypted socket for both, with a key at each end."""
    remote = launch.remote
    if remote is not None:
        both = context.socket(zmq.DEALER)
        both.set_hwm(0)
        both.setsockopt(zmq.IPV6, 1)
        both.curve_serverkey = remote.server_key.encode()
        both.curve_publickey = remote.public_key.encode()
        both.curve_secretkey = remote.secret_key.encode()
        both.connect(remote.address)
        return both, both
    requests, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end, address in ((requests, launch.requests), (outputs, launch.outputs)):
        end.set_hwm(0)
        end.connect(address)
    return requests, outputs


def _tell_progress(outputs: "zmq.Socket[bytes]", record: logging.LogRecord) -> None:
    _send(outputs, Loading(getattr(record, NUM_BYTES), getattr(record, TOTAL_BYTES)))


def _load(core: str) -> Callable[[EngineConfig, Start], Core]:
    module, _, name = core.partition(":")
    loaded: Callable[[EngineConfig, Start], Core] = getattr(importlib.import_module(module), name)
    return loaded


def _fail(in_flight: InFlightStep, message: str, *, mistake: bool) -> None:
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]} ... (cut)"
    # Not a message: the sockets may not be connected yet, and the server reads the file after the death.
    in_flight.leave_words(protocol.encode(Failed(message, mistake)))


def _send(socket: "zmq.Socket[bytes]", message: FromEngine) -> None:
    socket.send(protocol.encode(message), zmq.NOBLOCK)


def _die_soon_after_parent() -> None:
    """Have the kernel end this process `signal.SIGHUP` = 1 second after its parent, even if Python hangs.

    Until the sockets are open at both ends, this process must survive its parent to remove their folder. The handler is
    C's `alarm`, which takes the signal's number for seconds: Python's handlers wait for the interpreter's lock.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGHUP, libc.alarm)
    die_with_parent(signal.SIGHUP)


def _exit_with_parent(folder: str) -> None:
    # Not through sys.stdin: this thread would hold its lock while the interpreter shuts down.
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    """Run as `python -m penstock.engine.process`, with a `Launch` as the first line of standard input."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group or unit; the server decides
        signal.signal(ignored, signal.SIG_IGN)
    _die_soon_after_parent()
    launch = protocol.decode_launch(read_first_line())
    threading.Thread(target=_exit_with_parent, args=(launch.folder,), name="parent-watch", daemon=True).start()
    return run_engine(launch)


if __name__ == "__main__":
    end_process(main())
