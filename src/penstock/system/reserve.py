"""Reserves memory for a model's weights and its KV pool, and pre-faults it before they are allocated.

The first access to a page takes time: the kernel clears it, and in a virtual machine the host does so first. `startup`
opens a reserve while torch is imported; weights and pool are then allocated from it. docs/architecture.md ("Settings")
states the gain.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a reserve is opened before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

FIRST_TOKENS = 12288
"""Tokens whose share of the KV pool is pre-faulted before the first request, if there is time."""
_STEP = 4 << 20
_LINE = 64
_LIBC = ctypes.CDLL(None)


class Arena:
    """A bump allocator over zeroed memory, whose first pages can be pre-faulted.

    Raises:
        OSError: the system cannot reserve such a range of addresses.
    """

    def __init__(self, size: int, to_back: int) -> None:
        """`to_back`: number of bytes, from the beginning, that `back_some` pre-faults."""
        self._hold(_new_map(size), to_back)

    def _hold(self, mapped: mmap.mmap, to_back: int) -> None:
        self._map, self._size = mapped, len(mapped)
        self._to_back = min(to_back, self._size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._taken = 0
        self.backed = 0
        """Bytes that are pre-faulted; the system backs the others when they are first touched."""

    def take(self, size: int) -> "NDArray[np.uint8] | None":
        """Allocate zeroed bytes, aligned to a page if they fill one, else to a cache line; None if too few are left."""
        import numpy as np

        first = aligned(self._taken, size)
        if first + size > self._size:
            return None
        self._taken = first + size
        return np.frombuffer(self._map, np.uint8, size, first)

    def back_some(self) -> bool:
        """Pre-fault the next few pages; False if none are left to."""
        step = min(_STEP, self._to_back - self.backed)
        if step <= 0:
            return False
        self._back(self._address + self.backed, step)
        self.backed += step
        return True

    def give_back_rest(self) -> None:
        """Return what was not allocated to the system. Nothing can be allocated afterwards."""
        first = math.ceil(self._taken / mmap.PAGESIZE) * mmap.PAGESIZE
        if first < self._size:
            self._map.madvise(mmap.MADV_DONTNEED, first)
        self._taken = self._size

    def _back(self, address: int, count: int) -> None:
        # By writing to it: while madvise(2) backs memory, all others of the process that want some wait.
        ctypes.memset(address, 0, count)


class FileArena(Arena):
    """An arena over the pages of a file: writing to its memory writes to the file.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, file: int, first: int, size: int) -> None:
        """Map `size` allocated bytes of the file from byte `first` on, a multiple of the page size."""
        self._first = first
        mapped = mmap.mmap(file, size, offset=first)
        ask_for_huge_pages(mapped)
        self._hold(mapped, size)

    def offset_of(self, taken: "NDArray[np.uint8]") -> int | None:
        """The offset in the file of an array allocated here; None if it was allocated elsewhere."""
        offset = taken.ctypes.data - self._address
        is_taken = offset >= 0 and offset + taken.nbytes <= self._taken
        return self._first + offset if is_taken else None

    @property
    def end(self) -> int:
        """The offset in the file at which the allocated part ends."""
        return self._first + self._taken

    def _back(self, address: int, count: int) -> None:
        # By reading: pages that were written to would go to the disk twice.
        _LIBC.memchr(ctypes.c_void_p(address), 1, ctypes.c_size_t(count))


class Reserve:
    """An arena for weights, if given, and one for all else. A thread pre-faults them in this order until it is stopped
    or memory is allocated. Without their own arena, weights are allocated from the other one.
    """

    def __init__(self, arena: Arena | None, for_weights: FileArena | None = None) -> None:
        self._arena, self._for_weights = arena, for_weights
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._back, name="reserve", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop pre-faulting."""
        self._stopped.set()
        self._thread.join()

    @property
    def num_backed(self) -> int:
        """Pre-faulted bytes, without those of files, which the system counts as free memory."""
        return 0 if self._arena is None else self._arena.backed

    def take(self, size: int, for_weights: bool) -> "NDArray[np.uint8] | None":
        """See `Arena.take`."""
        self.stop()
        taken = self._for_weights.take(size) if for_weights and self._for_weights is not None else None
        return self._arena.take(size) if taken is None and self._arena is not None else taken

    def give_back_rest(self) -> None:
        """Return unused memory to the system. Nothing can be allocated afterwards."""
        self.stop()
        for arena in (self._for_weights, self._arena):
            if arena is not None:
                arena.give_back_rest()
        # Frames of handled errors can keep this object alive until garbage is collected; they must not keep the memory.
        self._arena = self._for_weights = None

    def _back(self) -> None:
        for arena in (self._for_weights, self._arena):
            while arena is not None and not self._stopped.is_set() and arena.back_some():
                pass


_OPEN: ContextVar[Reserve | None] = ContextVar("reserve", default=None)
"""The reserve of the thread that loads a model, while it does."""


@contextmanager
def opened(reserve: Reserve | None) -> Iterator[None]:
    """Context in which `zeros` allocates from the reserve; at its end unused memory is returned to the system."""
    token = _OPEN.set(reserve)
    try:
        yield
    finally:
        _OPEN.reset(token)
        if reserve is not None:
            reserve.give_back_rest()


def num_backed() -> int:
    """Pre-faulted bytes of the open reserve, which the system no longer counts as free."""
    open_reserve = _OPEN.get()
    return 0 if open_reserve is None else open_reserve.num_backed


def zeros(size: int, *, for_weights: bool = False) -> "NDArray[np.uint8]":
    """Allocate zeroed bytes, aligned to a cache line, from the open reserve while it has room.

    Args:
        for_weights: whether they will hold packed weights, which may be allocated in a file.

    Raises:
        MemoryError: the system has too little memory.
    """
    import numpy as np

    open_reserve = _OPEN.get()
    taken = None if open_reserve is None else open_reserve.take(size, for_weights)
    if taken is not None:
        return taken
    try:
        return np.frombuffer(_new_map(size), np.uint8, size)
    except OSError as error:
        raise MemoryError(f"the system has no {size} bytes: {error}") from error


def aligned(offset: int, size: int) -> int:
    """The next offset for `size` bytes: page-aligned if they fill a page, else aligned to a cache line."""
    unit = mmap.PAGESIZE if size >= mmap.PAGESIZE else _LINE
    return math.ceil(offset / unit) * unit


def _new_map(size: int) -> mmap.mmap:
    """Map zeroed pages, which take physical memory on first use.

    calloc(3) may instead return freed heap memory, which it clears and which is resident already.
    """
    # Private: of shared memory, the default, there are only small pages.
    pages = math.ceil(max(size, 1) / mmap.PAGESIZE)
    mapped = mmap.mmap(-1, pages * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(mapped)
    return mapped


def ask_for_huge_pages(mapped: mmap.mmap) -> None:
    """Ask the kernel to back a mapping with huge pages, if available."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
