"""Allocates the memory of an engine's weights, caches and states, some of it pre-faulted before they are made.

Memory costs time when it is first touched: the system clears it, and where the machine is a virtual one its host does
first. `startup` makes an allocator that pre-faults memory while torch is imported; weights and pool take from it in the
order in which they are made. docs/architecture.md ("Settings") says what that gains.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an allocator is made before numpy is imported
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


class Allocator:
    """Allocates zeroed memory: from an arena as long as that has any, then from the system.

    A thread pre-faults the arena until it is stopped or memory is allocated.
    """

    def __init__(self, arena: Arena | None = None, file_arena: FileArena | None = None) -> None:
        """`file_arena`: pre-faulted before the arena, for the model whose weights will be allocated `in_file`."""
        self._arena = arena
        self._file_arena: FileArena | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if arena is not None or file_arena is not None:
            arenas = [each for each in (file_arena, arena) if each is not None]
            self._thread = threading.Thread(
                target=_pre_fault, args=(arenas, self._stopped), name="pre-fault", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop pre-faulting."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def num_backed(self) -> int:
        """Pre-faulted bytes, without those of files, which the system counts as free memory."""
        return 0 if self._arena is None else self._arena.backed

    @contextmanager
    def in_file(self, arena: FileArena) -> Iterator[None]:
        """Context in which weights are allocated from the pages of a file, as long as it has any.

        At its end the unused pages are returned: another model's weights do not belong into the file.
        """
        self._file_arena = arena
        try:
            yield
        finally:
            self.stop()
            arena.give_back_rest()
            self._file_arena = None

    def zeros(self, size: int, *, for_weights: bool = False) -> "NDArray[np.uint8]":
        """Zeroed bytes, aligned to a cache line.

        Args:
            for_weights: whether they will hold packed weights, which may lie in a file.

        Raises:
            MemoryError: the system has no room for them.
        """
        import numpy as np

        self.stop()  # it would overwrite what is allocated
        for arena in (self._file_arena if for_weights else None, self._arena):
            taken = None if arena is None else arena.take(size)
            if taken is not None:
                return taken
        try:
            return np.frombuffer(_new_map(size), np.uint8, size)
        except OSError as error:
            raise MemoryError(f"the system has no {size} bytes: {error}") from error

    def give_back_rest(self) -> None:
        """Return the arena's unused memory to the system, which alone provides memory from then on."""
        self.stop()
        if self._arena is not None:
            self._arena.give_back_rest()
        # Frames of handled errors can keep this object alive until garbage is collected; they must not keep the memory.
        self._arena = None


def _pre_fault(arenas: list[Arena], stopped: threading.Event) -> None:
    for arena in arenas:
        while not stopped.is_set() and arena.back_some():
            pass


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
