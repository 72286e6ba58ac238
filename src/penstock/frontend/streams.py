"""What a caller holds of its requests while the engine works on them."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError, SlowReaderError
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.request import RequestOutput


class RequestStream:
    """The requests of one call, in flight together.

    Iterate for what is new, as lists of (position of the request in the call, delta), or wait for `results()`.
    Leaving the `with` block ends, with `abort`, whatever is unfinished. A reader that is busy with something else while
    more than `max_unread` tokens come for each sequence loses the rest. One that waits for news is never behind: that
    it was not woken yet is this process's slowness, not its own.
    """

    def __init__(
        self,
        leave: Callable[[str, "RequestStream"], None],
        output_processors: dict[str, OutputProcessor],
        keep_deltas: bool,
        max_unread: int,
        deltas: Sequence[tuple[int, CompletionDelta]] = (),
    ) -> None:
        """
        Args:
            leave: called with the id of an unfinished request that is of no more interest here.
            deltas: what is to be read before anything new.
        """
        self._leave = leave
        self._output_processors = output_processors
        self._positions = {request_id: position for position, request_id in enumerate(output_processors)}
        self._keep_deltas = keep_deltas
        sequences = sum(output_processor.request.params.n for output_processor in output_processors.values())
        self._max_unread = max_unread * sequences
        self._unread = 0
        self._reader_waits = False
        self._deltas = list(deltas)
        self._unfinished = sum(not output_processor.finished for output_processor in output_processors.values())
        self._error: PenstockError | None = None
        self._news = asyncio.Event()

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[tuple[int, CompletionDelta]]:
        while True:
            if self._deltas:
                deltas, self._deltas, self._unread = self._deltas, [], 0
                return deltas
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._news.clear()
            self._reader_waits = True
            try:
                await self._news.wait()
            finally:
                self._reader_waits = False

    async def results(self) -> list[RequestOutput]:
        """The complete answers, once all are.

        Raises:
            EngineError: the engine was given up, or closed, before that.
            QueueTimeoutError: a request waited in the queue for too long.
        """
        while self.running:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return self.snapshot()

    def snapshot(self) -> list[RequestOutput]:
        """The answers as far as they got."""
        return [output_processor.result() for output_processor in self._output_processors.values()]

    def abort(self) -> None:
        """End whatever is unfinished, here and in the engine; idempotent."""
        for request_id, output_processor in self._output_processors.items():
            if not output_processor.finished:
                self._leave(request_id, self)

    @property
    def running(self) -> bool:
        """Whether anything may still come."""
        return self._unfinished > 0 and self._error is None

    def deliver(self, request_id: str, delta: CompletionDelta | None) -> None:
        """Called by the engine: something came for a request, perhaps its end."""
        if self._output_processors[request_id].finished:
            self._unfinished -= 1
        if delta is not None and self._keep_deltas and self._error is None:
            self._keep(self._positions[request_id], delta)
        if self._keep_deltas or not self._unfinished:
            self._news.set()

    def _keep(self, position: int, delta: CompletionDelta) -> None:
        self._unread += 0 if self._reader_waits else len(delta.token_ids)
        if self._unread <= self._max_unread:
            self._deltas.append((position, delta))
            return
        self._deltas = []
        self.fail_stream(SlowReaderError(f"the stream's reader fell more than {self._max_unread} tokens behind"))

    def fail_stream(self, error: PenstockError) -> None:
        """Nothing will come any more; what the engine still does for the call is ended."""
        self._error = self._error or error
        self._news.set()
        self.abort()
