"""Work on large inputs: in threads beside the event loop, with a limit on the total input size.

While it runs, parsing or tokenising takes up to a hundred times the input's size in memory: for 4 MB of text, 0.6 GB.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import ShuttingDownError

T = TypeVar("T")

MAX_BYTES = 8 * 2**20
NUM_THREADS = 8
SECONDS_A_BYTE = 30 / 2**20
"""Extra waiting time per byte of input, so that many large inputs do not delay small ones."""


class LargeWork:
    """Threads that process at most `max_bytes` of input at a time.

    An input takes at most half of the free bytes, so that smaller inputs have room beside it. The waiting input with
    the earliest deadline (arrival plus a delay proportional to its size) is next, and none overtakes it, so each has
    its turn.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = max_bytes
        self._largest = max_bytes // 2
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []  # due, number, size, turn
        self._threads = ThreadPoolExecutor(NUM_THREADS, "large-work")
        self._is_closed = False

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on an input of `size` bytes in a thread. A caller that is cancelled leaves the queue.

        Raises:
            ShuttingDownError: the server is shutting down.
        """
        size = min(size, self._largest)
        await self._enter(size)
        if self._is_closed:
            raise ShuttingDownError("the server is shutting down")
        loop = asyncio.get_running_loop()
        done = self._threads.submit(work)
        # Released when the thread ends, not when the caller is cancelled: the thread continues.
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave, size))
        return await asyncio.wrap_future(done)

    async def _enter(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        due = self._clock() + size * SECONDS_A_BYTE
        heapq.heappush(self._waiting, (due, next(self._numbers), size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had already come
                self._leave(size)
            raise

    def _leave(self, size: int) -> None:
        self._free += size
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            _, _, size, turn = self._waiting[0]
            if not turn.cancelled():
                if 2 * size > self._free:
                    return
                self._free -= size
                turn.set_result(None)
            heapq.heappop(self._waiting)

    def close(self) -> None:
        """Start no further work, and wait for running work."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
