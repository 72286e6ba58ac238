"""Processes that decode strangers' images or sounds.

At most `NUM_WORKERS` decode at a time. One that crashes or exceeds its limits ends alone, and what it decoded is
refused.
"""

import queue
import signal
from collections.abc import Callable

from penstock.dataclass import dataclass
from penstock.errors import EngineDeadError, EngineError, InvalidRequestError
from penstock.frontend.decoder_frames import NO_MEMORY
from penstock.system.worker_process import WorkerEndedError, WorkerProcess

NUM_WORKERS = 2
PATIENCE = 120.0
"""Seconds beyond its CPU time that a decoding process may take."""
_LONGEST_ANSWER = 2**29


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """A kind of data, and the module that decodes it."""

    module: str
    what: str
    """Its name in messages."""
    cpu_seconds: float
    """The module's limit."""
    check: Callable[[], None] = lambda: None
    """Raises if a package that the module needs is missing."""


class Decoders:
    """Processes, started when they are first needed; each serves one thread at a time."""

    def __init__(self, kind: DecoderKind) -> None:
        self._kind = kind
        self._idle: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(NUM_WORKERS):
            self._idle.put(None)
        self._running: set[WorkerProcess] = set()
        self._is_closed = False

    @property
    def _patience(self) -> float:
        return self._kind.cpu_seconds + PATIENCE

    def ask(self, frame: bytes, field: str) -> bytes:
        """The answer of a process; one that was killed from outside is replaced once.

        Raises:
            InvalidRequestError: what it decoded ended the process.
            EngineError: there is no process, or it was killed twice.
        """
        for _ in range(2):
            answer = self._attempt(frame, field)
            if answer is not None:
                return answer
        raise EngineError(f"the process that decodes {self._kind.what}s was killed from outside, twice in a row")

    def _attempt(self, frame: bytes, field: str) -> bytes | None:
        worker = self._idle.get()
        kept: WorkerProcess | None = None
        try:
            if self._is_closed:
                raise EngineDeadError(f"the engine is closed, and its {self._kind.what} reader with it")
            worker = worker or self._start()
            self._running.add(worker)
            answer = worker.ask(frame, longest=_LONGEST_ANSWER, patience=self._patience)
            if answer[:1] != NO_MEMORY:  # after which it ends
                kept = worker
            return answer
        except WorkerEndedError as error:
            self._blame(error.exit_code, field)
            return None
        finally:
            if kept is None and worker is not None:
                self._running.discard(worker)
                worker.kill()
            self._idle.put(kept)

    def close(self) -> None:
        """Kill all processes; pending calls of `ask` fail."""
        self._is_closed = True
        for worker in list(self._running):
            worker.kill()
        # Waits for the calls under way, which end as their processes are killed.
        idle = [self._idle.get() for _ in range(NUM_WORKERS)]
        for worker in filter(None, idle):
            worker.close()
        for _ in idle:
            self._idle.put(None)

    def _start(self) -> WorkerProcess:
        self._kind.check()
        try:
            return WorkerProcess(self._kind.module)
        except OSError as error:
            raise EngineError(f"the process that decodes {self._kind.what}s cannot be started: {error}") from error

    def _blame(self, exit_code: int | None, field: str) -> None:
        """Raise if the data ended the process, rather than a kill from outside.

        Raises:
            InvalidRequestError: decoding exceeded a time limit, or crashed the process.
        """
        # 0: it retired after data that exhausted its memory.
        if exit_code in (0, -signal.SIGKILL):
            return
        fault = f"ends the process that decodes it, with exit code {exit_code}"
        if exit_code is None:
            fault = f"was not decoded within {self._patience:g} s"
        elif exit_code == -signal.SIGPROF:
            fault = f"takes more than {self._kind.cpu_seconds:g} s of processor time to decode"
        raise InvalidRequestError(f"{field}: the {self._kind.what} {fault}", field)
