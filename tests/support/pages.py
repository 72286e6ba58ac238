"""Which memory the system has backed with pages."""

import ctypes
import mmap

import numpy as np


def backed_bytes(array: np.ndarray) -> int:
    """Bytes of the pages of a contiguous array that are backed; Linux only."""
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - begin
    pages = bytearray(-(-size // mmap.PAGESIZE))
    given = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), given) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
