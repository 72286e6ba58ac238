"""Whether the form that a request asks for can be had, found out before the request is taken on.

    submit(structured) ──> a thread ──pipe──> a worker process, which a bad grammar may take down

What was found out is kept, so that only the first request of a form waits.
"""

import contextlib
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from penstock.errors import EngineError, InvalidRequestError
from penstock.sampling_params import Structured
from penstock.structured.grammar import refusal

KEPT = 1024
GRACE = 1.0
PATIENCE = 60.0
"""Seconds of a clock on the wall after which the worker is given up, whatever it does; it has limits of its own."""


class Inspector:
    """Has a worker process, from the first form on. All calls come from one thread.

    Where a form cannot be had, the future fails with `InvalidRequestError`.
    """

    def __init__(self, model_path: str, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", "penstock.structured.worker", model_path, str(vocab_size)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspector")
        self._worker: subprocess.Popen[bytes] | None = None
        self._found: OrderedDict[Structured, Future[None]] = OrderedDict()
        self._closed = False

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
        if error is None and not self._closed:  # it may have been killed for what has nothing to do with the form
            error = self._ask(structured)
        if error is None:
            raise EngineError("the process that checks grammars ended")
        if error:
            raise InvalidRequestError(error, "structured")

    def _ask(self, structured: Structured) -> str | None:
        """What is wrong with a form, empty if nothing is; None if the worker ended, and not by the form's fault."""
        worker = self._worker or self._start()
        assert worker.stdin is not None
        try:
            worker.stdin.write(msgspec.json.encode(structured) + b"\n")
            worker.stdin.flush()
            return _hear(worker)
        except (OSError, EOFError):
            code = self._end()
            if code == -signal.SIGKILL:
                return None
            return str(refusal(structured, "compiling it takes too much time or memory"))

    def _start(self) -> "subprocess.Popen[bytes]":
        """
        Raises:
            EngineError: it does not start.
        """
        self._worker = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            _hear(self._worker)
        except (OSError, EOFError):
            raise EngineError(f"the process that checks grammars did not start: exit code {self._end()}") from None
        return self._worker

    def _end(self) -> int:
        """End the worker; its exit code, or that of a signal, negative."""
        worker, self._worker = self._worker, None
        if worker is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is about to tell how it ended
            worker.wait(GRACE)
        code = worker.poll()
        worker.kill()
        with worker:
            return worker.wait() if code is None else code

    def close(self) -> None:
        """End the worker, whatever it is at."""
        self._closed = True
        worker = self._worker
        if worker is not None:
            worker.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()


def _hear(worker: "subprocess.Popen[bytes]") -> str:
    """
    Raises:
        EOFError: the worker has ended, or says nothing.
    """
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], PATIENCE)
    line = worker.stdout.readline() if ready else b""
    if not line:
        raise EOFError
    return msgspec.json.decode(line, type=str)


def _is_verdict(future: "Future[None]") -> bool:
    if future.cancelled():
        return False
    error = future.exception()
    return error is None or isinstance(error, InvalidRequestError)
