"""Trial compilation of a request's grammar in a worker process, before the request is accepted.

    submit(structured) ──> a thread ──socket──> a worker process, which a bad grammar may kill

Results are cached, so that only the first request with a grammar waits.
"""

import signal
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from penstock.api.sampling_params import Structured
from penstock.errors import EngineError, InvalidRequestError
from penstock.structured.form_limits import refusal
from penstock.system.worker_process import WorkerEndedError, WorkerProcess

MAX_RESULTS = 512
MAX_CHARACTERS = 2**22
"""Total characters of the grammars whose results are cached."""
PATIENCE = 60.0
LONGEST_ANSWER = 2**16
"""Maximum bytes of the worker's answer, an error message."""
GRAMMAR_SIGNALS = frozenset(
    -number for number in (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
)
"""Signals by which a grammar can end the worker, as negative exit codes; other signals come from outside."""


class GrammarValidator:
    """Validates grammars in a worker process, which the first grammar starts. All calls must come from one thread."""

    def __init__(self, model_path: str, vocab_size: int, patience: float = PATIENCE) -> None:
        """
        Args:
            patience: seconds of wall time after which the worker is killed; its own limits are on processor time.
        """
        self.patience = patience
        self._vocabulary = model_path, vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-validator")
        self._worker: WorkerProcess | None = None
        self._results: OrderedDict[Structured, Future[None]] = OrderedDict()
        self._num_characters = 0  # of the grammars in `_results`
        self._closed = False
        self._starting = threading.Lock()

    def submit(self, structured: Structured) -> "Future[None]":
        """A future that succeeds if the grammar is valid, and otherwise fails with `InvalidRequestError`."""
        future = self._results.get(structured)
        if future is None:
            self._num_characters += structured.num_characters
        if future is None or (future.done() and not _is_result(future)):
            future = self._results[structured] = self._thread.submit(self._validate, structured)
        self._results.move_to_end(structured)
        while len(self._results) > MAX_RESULTS or (len(self._results) > 1 and self._num_characters > MAX_CHARACTERS):
            oldest, _ = self._results.popitem(last=False)
            self._num_characters -= oldest.num_characters
        return future

    def knows(self, structured: Structured) -> bool:
        """Whether the result is cached."""
        future = self._results.get(structured)
        return future is not None and future.done() and _is_result(future)

    def _validate(self, structured: Structured) -> None:
        error = self._ask(structured)
        if error is None:  # killed from outside: the grammar gets a second worker
            error = self._ask(structured)
        if error is None:
            raise EngineError("the process that checks grammars ended")
        if error:
            raise InvalidRequestError(error, "structured")

    def _ask(self, structured: Structured) -> str | None:
        """The validation error, empty if there is none; None if the worker died for a reason other than the grammar."""
        frame = _encoded(structured)
        worker = self._worker or self._start()
        try:
            answer = worker.ask(frame, longest=LONGEST_ANSWER, patience=self.patience)
        except WorkerEndedError as ended:
            self._worker = None
            if ended.exit_code is None or (ended.exit_code <= 0 and ended.exit_code not in GRAMMAR_SIGNALS):
                return None
            return str(refusal(structured, "compiling it takes too much time or memory"))
        return answer.decode()

    def _start(self) -> WorkerProcess:
        """
        Raises:
            EngineError: it does not start, or the validator is closed.
        """
        with self._starting:  # so that `close` misses no worker
            if self._closed:
                raise EngineError("the server is shutting down")
            try:
                self._worker = worker = WorkerProcess("penstock.structured.worker")
            except OSError as error:
                raise EngineError(f"the process that checks grammars did not start: {error}") from None
        try:
            worker.ask(_encoded(self._vocabulary), longest=LONGEST_ANSWER, patience=self.patience)
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


def _encoded(value: Any) -> bytes:
    import msgspec  # here: a start without grammars has no need of it

    return msgspec.json.encode(value)


def _is_result(future: "Future[None]") -> bool:
    if future.cancelled():
        return False
    error = future.exception()
    return error is None or isinstance(error, InvalidRequestError)
