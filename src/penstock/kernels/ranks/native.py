"""Collective operations between ranks of one machine over shared memory (`csrc/ranks.h` has the layout)."""

import ctypes
import mmap
import os

from penstock.config.ranks import Ranks
from penstock.errors import DeviceLostError
from penstock.native import LOST, LOST_WORDS, Library
from penstock.native.array import Array, dtype_name
from penstock.native.program import call, empty_rows
from penstock.native.structs import ExchangeArgs
from penstock.native.structs import Ranks as RanksStruct

SLOT_BYTES = 8 * 2**20
"""Bytes of a rank's slot for one collective operation. A row of logits must fit."""
_LENGTH = 8
_PIECE = SLOT_BYTES - _LENGTH
"""Bytes of a message's length field, and of the piece of a message that one slot carries."""


class SharedMemoryCollective:
    """See `penstock.kernels.ranks.Collective` for the methods."""

    def __init__(self, library: Library, ranks: Ranks, file: int) -> None:
        """
        Args:
            file: file descriptor that `shared_file` made.
        """
        self.ranks = ranks
        self._library = library
        self._memory = mmap.mmap(file, shared_bytes(library, ranks.size))
        self._start = ctypes.c_uint8.from_buffer(self._memory)
        self._ranks = RanksStruct(
            rank=ranks.rank, size=ranks.size, shared=ctypes.addressof(self._start), slot_bytes=SLOT_BYTES
        )
        self._slot = library.function("penstock_slot", "p", ctypes.c_void_p)
        self._meet = library.function("penstock_meet", "p", ctypes.c_int32)
        self._lose = library.function("penstock_lose", "p")

    @property
    def handle(self) -> int:
        """Address of the library's `Ranks`."""
        return ctypes.addressof(self._ranks)

    def columns(self, x: Array, total: int, *, first_only: bool = False) -> Array:
        out = empty_rows(x, (total,), x.dtype)
        self._exchange(x, out, first_only=first_only)
        return out

    def rows(self, x: Array, owned: Array, total: int) -> Array:
        assert dtype_name(owned.dtype) == "int64"
        assert owned.is_contiguous()
        out = empty_rows(x, (x.shape[1],), x.dtype)
        self._exchange(x, out, row_ids=owned.data_ptr(), num_ids=total)
        return out

    def _exchange(self, x: Array, out: Array, **arguments: int) -> None:
        assert x.stride(1) == 1
        assert out.stride(0) * out.dtype.itemsize <= SLOT_BYTES, "a row must fit in a slot"
        made = ExchangeArgs(
            ranks=self.handle,
            x=x.data_ptr(),
            x_stride=x.stride(0) * x.dtype.itemsize,
            y=out.data_ptr(),
            columns=out.shape[1],
            element_bytes=x.dtype.itemsize,
            **arguments,
        )
        call(self._library, x, made)

    def broadcast(self, message: bytes) -> bytes:
        """Broadcast rank 0's message, of any length, to every rank; other ranks' arguments are ignored.

        Raises:
            DeviceLostError: a rank has ended.
        """
        left, parts = message if self.ranks.rank == 0 else b"", []
        while True:  # each piece begins with the number of bytes left, this piece included
            slot = self._slot(self.handle)
            if self.ranks.rank == 0:
                piece = left[:_PIECE]
                ctypes.memmove(slot, len(left).to_bytes(_LENGTH, "little") + piece, _LENGTH + len(piece))
            self.meet()
            size = int.from_bytes(ctypes.string_at(slot, _LENGTH), "little")
            parts.append(ctypes.string_at(slot + _LENGTH, min(size, _PIECE)))
            if size <= _PIECE:
                return b"".join(parts)
            left = left[_PIECE:]

    def meet(self) -> None:
        """Barrier: wait until every rank has called this.

        Raises:
            DeviceLostError: a rank has ended.
        """
        if self._meet(self.handle) == LOST:
            raise DeviceLostError(LOST_WORDS)

    def abort(self) -> None:
        """Note that a rank has ended, and wake the calls that wait for it. Called by another thread."""
        self._lose(self.handle)


def shared_bytes(library: Library, size: int) -> int:
    """Bytes of the shared memory of `size` ranks."""
    needed: int = library.function("penstock_ranks_bytes", "ll", ctypes.c_int64)(size, SLOT_BYTES)
    return needed


def shared_file(library: Library, size: int) -> int:
    """Make shared memory for `size` ranks; returns its file descriptor, which their processes inherit."""
    file = os.memfd_create("penstock-ranks", os.MFD_CLOEXEC)
    os.ftruncate(file, shared_bytes(library, size))
    return file
