"""The stream of one call's outputs: from its open requests to its reader."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.api.request import RequestOutput
from penstock.errors import PenstockError, SlowReaderError
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor


class RequestStream:
    """The requests of one call, in flight together.

    Iterate for new deltas, as lists of (position of the request in the call, delta), or wait for `results()`. After
    `wake` a list may be empty. Leaving the `with` block aborts unfinished requests. A reader that lets more than
    `max_unread` tokens of a sequence pile up fails with SlowReaderError. A reader blocked in `__anext__` never counts
    as slow: if it has not been scheduled yet, the delay is this process's.
    """

    def __init__(
        self,
        leave: Callable[[str, "RequestStream"], None],
        output_processors: Sequence[OutputProcessor],
        keep_deltas: bool,
        max_unread: int,
        deltas: Sequence[tuple[int, CompletionDelta]] = (),
    ) -> None:
        """
        Args:
            leave: called with the id of an unfinished request that this stream stops reading.
            deltas: deltas to read before new ones.
        """
        self._leave = leave
        self._output_processors = output_processors
        self._keep_deltas = keep_deltas
        self._max_unread = max_unread * sum(processor.request.params.n for processor in output_processors)
        self._unread = 0
        self._woken = False
        self._deltas = list(deltas)
        self._unfinished = sum(not processor.finished for processor in output_processors)
        self._error: PenstockError | None = None
        self._reader: asyncio.Future[None] | None = None  # a waiting reader

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[tuple[int, CompletionDelta]]:
        while True:
            if self._deltas:
                deltas, self._deltas, self._unread, self._woken = self._deltas, [], 0, False
                return deltas
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            if self._woken:
                self._woken = False
                return []
            await self._wait()

    async def _wait(self) -> None:
        """Wait for news."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _notify(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def wake(self) -> None:
        """Let a waiting reader go on without a delta."""
        self._woken = True
        self._notify()

    async def results(self) -> list[RequestOutput]:
        """Wait for the complete answers.

        Raises:
            EngineError: the engine was given up or closed before all answers were complete.
            QueueTimeoutError: a request waited in the queue for too long.
        """
        while self.running:
            await self._wait()
        if self._error is not None:
            raise self._error
        return self.snapshot()

    @property
    def arithmetics(self) -> list[str]:
        """The arithmetic of each request's answer; empty for an answer without a token."""
        return [output_processor.arithmetic for output_processor in self._output_processors]

    def snapshot(self) -> list[RequestOutput]:
        """The answers so far."""
        return [output_processor.result() for output_processor in self._output_processors]

    def abort(self) -> None:
        """Abort unfinished requests, here and in the engine; idempotent."""
        for output_processor in self._output_processors:
            if not output_processor.finished:
                self._leave(output_processor.request.request_id, self)

    @property
    def running(self) -> bool:
        """Whether further outputs are possible."""
        return self._unfinished > 0 and self._error is None

    def deliver(self, position: int, delta: CompletionDelta | None, *, is_last: bool) -> None:
        """Take the delta of the request at this position in the call."""
        self._unfinished -= is_last
        if delta is not None and self._keep_deltas and self._error is None:
            # A reader that waits is not behind, however many tokens come in one delta.
            if self._reader is None:
                self._unread += len(delta.token_ids)
            if self._unread > self._max_unread:
                self._deltas = []
                unread = f"the stream's reader fell more than {self._max_unread} tokens behind"
                self.fail_stream(SlowReaderError(unread))
                return
            self._deltas.append((position, delta))
        # Who waits for complete answers is woken once, not for each token.
        if self._keep_deltas or not self._unfinished:
            self._notify()

    def fail_stream(self, error: PenstockError) -> None:
        """End the stream with an error, and abort its unfinished requests."""
        self._error = self._error or error
        self._notify()
        self.abort()
