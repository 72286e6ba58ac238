"""Allocates the memory of an engine's weights, caches and states.

The system clears a page when it is first touched, so memory is taken as it is used: a start touches what it fills.
"""

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a process that only looks for a packed file imports this module
    import numpy as np
    from numpy.typing import NDArray

_LINE = 64


class FileArena:
    """A bump allocator over the zeroed pages of a file: writing to its memory writes to the file.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, file: int, first: int, size: int) -> None:
        """Map `size` allocated bytes of the file from byte `first` on, a multiple of the page size."""
        import numpy as np

        self._map = mmap.mmap(file, size, offset=first)
        ask_for_huge_pages(self._map)
        self._first, self._size, self._taken = first, size, 0
        self._address: int = np.frombuffer(self._map, np.uint8, 1).ctypes.data

    def take(self, size: int) -> "NDArray[np.uint8] | None":
        """Allocate zeroed bytes, aligned to a page if they fill one, else to a cache line; None if too few are left."""
        import numpy as np

        first = aligned(self._taken, size)
        if first + size > self._size:
            return None
        self._taken = first + size
        return np.frombuffer(self._map, np.uint8, size, first)

    def offset_of(self, taken: "NDArray[np.uint8]") -> int | None:
        """The offset in the file of an array allocated here; None if it was allocated elsewhere."""
        offset = taken.ctypes.data - self._address
        is_taken = offset >= 0 and offset + taken.nbytes <= self._taken
        return self._first + offset if is_taken else None

    @property
    def end(self) -> int:
        """The offset in the file at which the allocated part ends."""
        return self._first + self._taken


class Allocator:
    """Allocates zeroed memory from the system, or that of weights from the pages of a file."""

    def __init__(self) -> None:
        self._file_arena: FileArena | None = None

    @contextmanager
    def in_file(self, arena: FileArena) -> Iterator[None]:
        """Context in which weights are allocated from the pages of a file, as long as it has any."""
        self._file_arena = arena
        try:
            yield
        finally:
            self._file_arena = None

    def zeros(self, size: int, *, for_weights: bool = False) -> "NDArray[np.uint8]":
        """Zeroed bytes, aligned to a cache line.

        Args:
            for_weights: whether they will hold packed weights, which may lie in a file.

        Raises:
            MemoryError: the system has no room for them.
        """
        import numpy as np

        taken = self._file_arena.take(size) if for_weights and self._file_arena is not None else None
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
