"""Work on large inputs: in threads beside the event loop, with a limit on the total input size.

While it runs, parsing or tokenising takes up to a hundred times the input's size in memory: for 4 MB of text, 0.6 GB.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.core.turns import Turns
from penstock.errors import ShuttingDownError

T = TypeVar("T")

MAX_BYTES = 8 * 2**20
NUM_THREADS = 8
LONGEST_REST = 1.0
"""Seconds: on a busy machine most of the time that work takes is not its own."""
SECONDS_A_BYTE = 30 / 2**20
"""Extra waiting time per byte of input, so that many large inputs do not delay small ones."""


class LargeWork:
    """Threads that process at most `max_bytes` of input at a time.

    An input takes at most half of the free bytes, so that smaller inputs have room beside it. The tenants take turns;
    of a tenant's inputs the one with the earliest deadline (arrival plus a delay proportional to its size) is next.
    None overtakes it, so each has its turn.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
        *,
        holds_lock: bool = False,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """
        Args:
            num_threads: maximum pieces of work at a time.
            holds_lock: whether the work holds the interpreter's lock for long, as parsing does. Then one piece of work
                runs at a time, and the next begins after a rest as long as that took: else the event loop, which gives
                the lock up with each read and write, would get it back for one of them at a time.
        """
        self._holds_lock = holds_lock
        self._num_free = 1 if holds_lock else num_threads
        self._free = max_bytes
        self._largest = max_bytes // 2
        self._clock = clock
        self._waiting: Turns[tuple[asyncio.Future[None], int]] = Turns()  # each with its size
        self._threads = ThreadPoolExecutor(num_threads, "large-work")
        self._is_closed = False

    async def run(self, size: int, work: Callable[[], T], tenant: str = "") -> T:
        """Run `work` on an input of `size` bytes in a thread. A caller that is cancelled leaves the queue.

        Raises:
            ShuttingDownError: the server is shutting down.
        """
        size = min(size, self._largest)
        await self._enter(size, tenant)
        if self._is_closed:
            raise ShuttingDownError("the server is shutting down")
        loop, begin = asyncio.get_running_loop(), self._clock()
        done = self._threads.submit(work)

        def leave() -> None:
            rest = min(self._clock() - begin, LONGEST_REST) if self._holds_lock else 0.0
            loop.call_later(rest, self._leave, size)

        # Released when the thread ends, not when the caller is cancelled: the thread continues.
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(leave))
        return await asyncio.wrap_future(done)

    async def _enter(self, size: int, tenant: str = "") -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, (turn, size), self._clock() + size * SECONDS_A_BYTE)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((turn, size))
                self._admit()
            else:  # its turn had already come
                self._leave(size)
            raise

    def _leave(self, size: int) -> None:
        self._free += size
        self._num_free += 1
        self._admit()

    def _admit(self) -> None:
        while (first := self._waiting.first()) is not None:
            turn, size = first
            if not turn.cancelled():
                # A piece takes at most half of what is free, so that smaller ones fit beside it.
                if 2 * size > self._free or not self._num_free:
                    return
                self._free -= size
                self._num_free -= 1
                turn.set_result(None)
            self._waiting.take_first()

    def close(self) -> None:
        """Start no further work, and wait for running work."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
