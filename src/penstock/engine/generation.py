"""What a caller holds of its requests while the engine works on them."""

import asyncio
from collections.abc import Callable

from penstock.engine.assembler import Assembler, CompletionDelta
from penstock.errors import EngineError
from penstock.request import RequestOutput


class Generation:
    """The requests of one call, in flight together.

    Iterate for what is new, as lists of (position of the request in the call, delta), or wait for `results()`.
    Leaving the `with` block ends, with `abort`, whatever is unfinished.
    """

    def __init__(self, abort: Callable[[str], None], assemblers: dict[str, Assembler], keep_deltas: bool) -> None:
        self._abort = abort
        self._assemblers = assemblers
        self._positions = {request_id: position for position, request_id in enumerate(assemblers)}
        self._keep_deltas = keep_deltas
        self._deltas: list[tuple[int, CompletionDelta]] = []
        self._unfinished = sum(not assembler.finished for assembler in assemblers.values())
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[tuple[int, CompletionDelta]]:
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                return deltas
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def results(self) -> list[RequestOutput]:
        """The complete answers, once all are.

        Raises:
            EngineError: the engine was given up, or closed, before that.
        """
        while self.running:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return self.snapshot()

    def snapshot(self) -> list[RequestOutput]:
        """The answers as far as they got."""
        return [assembler.result() for assembler in self._assemblers.values()]

    def abort(self) -> None:
        """End whatever is unfinished, here and in the engine; idempotent."""
        for request_id, assembler in self._assemblers.items():
            if not assembler.finished:
                self._abort(request_id)

    @property
    def running(self) -> bool:
        """Whether anything may still come."""
        return self._unfinished > 0 and self._error is None

    def deliver(self, request_id: str, delta: CompletionDelta | None) -> None:
        """Called by the engine: something came for a request, perhaps its end."""
        if delta is not None and self._keep_deltas:
            self._deltas.append((self._positions[request_id], delta))
        if self._assemblers[request_id].finished:
            self._unfinished -= 1
        if self._keep_deltas or not self._unfinished:
            self._news.set()

    def fail(self, error: EngineError) -> None:
        """Called by the engine: nothing will come any more."""
        self._error = error
        self._news.set()
