"""Trial compilation of a request's grammar in a worker process, before the request is accepted.

    submit(structured) ──> a thread ──socket──> a worker process, which a bad grammar may take down

Results are cached, so that only the first request with a grammar waits.
"""

import signal
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from penstock.api.sampling_params import Structured
from penstock.errors import EngineError, InvalidRequestError
from penstock.structured.grammar import refusal
from penstock.system.worker_process import WorkerEndedError, WorkerProcess

KEPT = 512
KEPT_CHARACTERS = 2**22
PATIENCE = 60.0
LONGEST_ANSWER = 2**16
"""Bytes of the worker's answer, an error message at most."""
CAUSED_BY_THE_FORM = frozenset(
    -number for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
)
"""Signals that kill a worker because of a grammar; other signals come from outside."""


class Inspector:
    """Owns a worker process, from the first grammar on. All calls come from one thread.

    For a grammar that cannot be compiled, the future fails with `InvalidRequestError`.
    """

    def __init__(self, model_path: str, vocab_size: int, patience: float = PATIENCE) -> None:
        """
        Args:
            patience: seconds of wall time after which the worker is given up; it has limits of its own.
        """
        self.patience = patience
        self._vocabulary = msgspec.json.encode((model_path, vocab_size))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspector")
        self._worker: WorkerProcess | None = None
        self._found: OrderedDict[Structured, Future[None]] = OrderedDict()
        self._num_characters = 0  # of the grammars in it
        self._closed = False
        self._starting = threading.Lock()

    def submit(self, structured: Structured) -> "Future[None]":
        """A future that succeeds if the grammar compiles."""
        future = self._found.get(structured)
        if future is None:
            self._num_characters += structured.num_characters
        if future is None or (future.done() and not _is_verdict(future)):
            future = self._found[structured] = self._thread.submit(self._inspect, structured)
        self._found.move_to_end(structured)
        while len(self._found) > KEPT or (len(self._found) > 1 and self._num_characters > KEPT_CHARACTERS):
            oldest, _ = self._found.popitem(last=False)
            self._num_characters -= oldest.num_characters
        return future

    def knows(self, structured: Structured) -> bool:
        """Whether `submit` has the result already."""
        future = self._found.get(structured)
        return future is not None and future.done() and _is_verdict(future)

    def _inspect(self, structured: Structured) -> None:
        error = self._ask(structured)
        if error is None:  # it may have been killed for another reason
            error = self._ask(structured)
        if error is None:
            raise EngineError("the process that checks grammars ended")
        if error:
            raise InvalidRequestError(error, "structured")

    def _ask(self, structured: Structured) -> str | None:
        """The compilation error, empty if there is none; None if the worker died for another reason."""
        frame = msgspec.json.encode(structured)
        worker = self._worker or self._start()
        try:
            answer = worker.ask(frame, longest=LONGEST_ANSWER, patience=self.patience)
        except WorkerEndedError as ended:
            self._worker = None
            if ended.exit_code is None or (ended.exit_code <= 0 and ended.exit_code not in CAUSED_BY_THE_FORM):
                return None
            return str(refusal(structured, "compiling it takes too much time or memory"))
        return answer.decode()

    def _start(self) -> WorkerProcess:
        """
        Raises:
            EngineError: it does not start, or the inspector is closed.
        """
        with self._starting:  # so that `close` finds every worker that there is
            if self._closed:
                raise EngineError("the server is shutting down")
            try:
                self._worker = worker = WorkerProcess("penstock.structured.worker")
            except OSError as error:
                raise EngineError(f"the process that checks grammars did not start: {error}") from None
        try:
            worker.ask(self._vocabulary, longest=LONGEST_ANSWER, patience=self.patience)
        except WorkerEndedError as ended:
            self._worker = None
            raise EngineError(f"the process that checks grammars did not start: {ended}") from None
        return worker

    def close(self) -> None:
        """Kill the worker, even while it compiles."""
        with self._starting:
            self._closed = True
            worker = self._worker
        if worker is not None:
            worker.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if worker is not None:
            worker.close()
        self._worker = None


def _is_verdict(future: "Future[None]") -> bool:
    if future.cancelled():
        return False
    error = future.exception()
    return error is None or isinstance(error, InvalidRequestError)
