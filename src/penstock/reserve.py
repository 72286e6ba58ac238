"""Memory that the system has backed already when a model's weights and its KV pool want it.

Memory costs time when it is first touched: the system clears it, and where the machine is a virtual one its host does
first. `startup` opens a reserve while torch is imported; weights and pool take from it in the order in which they are
made. docs/architecture.md ("Settings") says what that gains.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a reserve is opened before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

FIRST_TOKENS = 12288
"""Tokens whose share of the KV pool is pre-faulted before the first request, if there is time."""
_STEP = 4 << 20
_LINE = 64


class Reserve:
    """Memory whose first `to_back` bytes a thread backs with pages, until it is stopped or some is taken.

    Raises:
        OSError: the system has no such room for addresses.
    """

    def __init__(self, size: int, to_back: int) -> None:
        self._map = _new_map(size)
        self._size = len(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._to_back = min(to_back, self._size)
        self._taken = 0
        self._stopped = threading.Event()
        self.backed = 0
        """Bytes that are backed; the rest is when it is first touched."""
        self._thread = threading.Thread(target=self._back, name="reserve", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Back no more."""
        self._stopped.set()
        self._thread.join()

    def take(self, size: int) -> "NDArray[np.uint8] | None":
        """Zeroed bytes, aligned to a cache line; None if not enough are left."""
        import numpy as np

        self.stop()
        first = math.ceil(self._taken / _LINE) * _LINE
        if first + size > self._size:
            return None
        self._taken = first + size
        return np.frombuffer(self._map, np.uint8, size, first)

    def give_back(self, taken: "NDArray[np.uint8]") -> None:
        """Give the system back the memory of bytes that were taken, if they are of this reserve. They are lost."""
        first = math.ceil((taken.ctypes.data - self._address) / mmap.PAGESIZE) * mmap.PAGESIZE
        last = (taken.ctypes.data + taken.nbytes - self._address) // mmap.PAGESIZE * mmap.PAGESIZE
        if 0 <= first < last <= self._size:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def give_back_rest(self) -> None:
        """Give the system back what was not taken. Nothing can be taken afterwards."""
        first = math.ceil(self._taken / mmap.PAGESIZE) * mmap.PAGESIZE
        if first < self._size:
            self._map.madvise(mmap.MADV_DONTNEED, first)
        self._taken = self._size

    def _back(self) -> None:
        # By writing to it: while madvise(2) backs memory, all others of the process that want some wait.
        while not self._stopped.is_set() and self.backed < self._to_back:
            step = min(_STEP, self._to_back - self.backed)
            ctypes.memset(self._address + self.backed, 0, step)
            self.backed += step


_OPEN: ContextVar[Reserve | None] = ContextVar("reserve", default=None)
"""Set while a model is loaded, by the thread that loads it."""


@contextmanager
def opened(reserve: Reserve | None) -> Iterator[None]:
    """Context in which `zeros` takes memory from the reserve; at its end the rest is returned."""
    token = _OPEN.set(reserve)
    try:
        yield
    finally:
        _OPEN.reset(token)
        if reserve is not None:
            reserve.stop()
            reserve.give_back_rest()


def num_backed() -> int:
    """Bytes of the open reserve that are backed already, so that the system does not count them as free."""
    open_reserve = _OPEN.get()
    return 0 if open_reserve is None else open_reserve.backed


def give_back(taken: "NDArray[np.uint8]") -> None:
    """Return an array of `zeros` to the system, contents lost, if it is from the open reserve."""
    open_reserve = _OPEN.get()
    if open_reserve is not None:
        open_reserve.give_back(taken)


def zeros(size: int) -> "NDArray[np.uint8]":
    """Zeroed bytes that begin a cache line, of the open reserve while there is some left.

    Raises:
        MemoryError: the system has no room for them.
    """
    import numpy as np

    open_reserve = _OPEN.get()
    taken = None if open_reserve is None else open_reserve.take(size)
    if taken is not None:
        return taken
    try:
        return np.frombuffer(_new_map(size), np.uint8, size)
    except OSError as error:
        raise MemoryError(f"the system has no {size} bytes: {error}") from error


def _new_map(size: int) -> mmap.mmap:
    """Map zeroed pages, which take physical memory on first use.

    calloc(3) may instead return freed heap memory, which it clears and which is resident already.
    """
    # Private: of shared memory, the default, there are only small pages.
    pages = math.ceil(max(size, 1) / mmap.PAGESIZE)
    mapped = mmap.mmap(-1, pages * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
