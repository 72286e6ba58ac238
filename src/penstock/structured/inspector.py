"""Whether the form that a request asks for can be had, found out before the request is taken on.

    submit(structured) ──> a thread ──pipe──> a worker process, which a bad grammar may take down

What was found out is kept, so that only the first request of a form waits.
"""

import signal
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from penstock.errors import EngineError, InvalidRequestError
from penstock.sampling_params import Structured
from penstock.structured.grammar import refusal
from penstock.structured.worker_process import WorkerProcess

KEPT = 1024
PATIENCE = 60.0
CAUSED_BY_THE_FORM = frozenset(
    -number for number in (signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
)
"""How a worker ends that a form takes too far, beside an exception; other signals come from outside."""


class Inspector:
    """Has a worker process, from the first form on. All calls come from one thread.

    Where a form cannot be had, the future fails with `InvalidRequestError`.
    """

    def __init__(self, model_path: str, vocab_size: int, patience: float = PATIENCE) -> None:
        """
        Args:
            patience: seconds of wall time after which the worker is given up; it has limits of its own.
        """
        self.patience = patience
        self._command = [sys.executable, "-m", "penstock.structured.worker", model_path, str(vocab_size)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspector")
        self._worker: WorkerProcess | None = None
        self._found: OrderedDict[Structured, Future[None]] = OrderedDict()
        self._closed = False
        self._starting = threading.Lock()

    def submit(self, structured: Structured) -> "Future[None]":
        """Succeeds if the form can be had."""
        future = self._found.get(structured)
        if future is None or (future.done() and not _is_verdict(future)):
            future = self._found[structured] = self._thread.submit(self._inspect, structured)
        self._found.move_to_end(structured)
        if len(self._found) > KEPT:
            self._found.popitem(last=False)
        return future

    def _inspect(self, structured: Structured) -> None:
        error = self._ask(structured)
        if error is None:  # it may have been killed for what has nothing to do with the form
            error = self._ask(structured)
        if error is None:
            raise EngineError("the process that checks grammars ended")
        if error:
            raise InvalidRequestError(error, "structured")

    def _ask(self, structured: Structured) -> str | None:
        """What is wrong with a form, empty if nothing is; None if the worker ended, and not by the form's fault."""
        line = msgspec.json.encode(structured)
        worker = self._worker or self._start()
        try:
            answer = worker.ask(line, self.patience)
        except (OSError, EOFError):
            code = self._end(worker)
            if code <= 0 and code not in CAUSED_BY_THE_FORM:
                return None
            return str(refusal(structured, "compiling it takes too much time or memory"))
        return msgspec.json.decode(answer, type=str)

    def _start(self) -> WorkerProcess:
        """
        Raises:
            EngineError: it does not start, or the inspector is closed.
        """
        with self._starting:  # so that `close` finds every worker that there is
            if self._closed:
                raise EngineError("the server is shutting down")
            try:
                self._worker = worker = WorkerProcess(self._command)
            except OSError as error:
                raise EngineError(f"the process that checks grammars did not start: {error}") from None
        try:
            worker.read_line(self.patience)
        except (OSError, EOFError):
            code = self._end(worker)
            raise EngineError(f"the process that checks grammars did not start: exit code {code}") from None
        return worker

    def _end(self, worker: WorkerProcess) -> int:
        """End the worker; its exit code, or that of a signal, negative."""
        self._worker = None
        return worker.close()

    def close(self) -> None:
        """End the worker, whatever it is at."""
        with self._starting:
            self._closed = True
            worker = self._worker
        if worker is not None:
            worker.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._worker is not None:
            self._end(self._worker)


def _is_verdict(future: "Future[None]") -> bool:
    if future.cancelled():
        return False
    error = future.exception()
    return error is None or isinstance(error, InvalidRequestError)
