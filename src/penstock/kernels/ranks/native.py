"""The exchange of ranks of one machine, over memory that they share (`csrc/ranks.h` draws it)."""

import ctypes
import mmap
import os

import torch
from torch import Tensor

from penstock.errors import DeviceLostError
from penstock.native import LOST, LOST_WORDS, Library
from penstock.native.program import Operation, call, empty_rows
from penstock.native.structs import ExchangeArgs
from penstock.native.structs import Ranks as RanksStruct
from penstock.ranks import Ranks

SLOT_BYTES = 8 * 2**20
"""Of what is exchanged at one time. A row of logits must fit."""
_LENGTH = 8
_PIECE = SLOT_BYTES - _LENGTH
"""Bytes of a message's length, and of what is shared of it at one time."""


class SharedExchange:
    """See `penstock.kernels.ranks.Exchange` for the methods."""

    def __init__(self, library: Library, ranks: Ranks, file: int) -> None:
        """
        Args:
            file: a descriptor of what `shared_file` made.
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
        """Where the library finds it."""
        return ctypes.addressof(self._ranks)

    def columns(self, x: Tensor, total: int, *, first_only: bool = False) -> Tensor:
        out = empty_rows(x, (total,), x.dtype)
        self._exchange(x, out, first_only=first_only)
        return out

    def rows(self, x: Tensor, owned: Tensor, total: int) -> Tensor:
        assert owned.dtype == torch.int64
        assert owned.is_contiguous()
        out = empty_rows(x, (x.shape[1],), x.dtype)
        self._exchange(x, out, row_ids=owned.data_ptr(), num_ids=total)
        return out

    def _exchange(self, x: Tensor, out: Tensor, **arguments: int) -> None:
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
        call(self._library, x, Operation.EXCHANGE, made)

    def share(self, message: bytes) -> bytes:
        """The first rank's message, of any length, at every rank; what the others give is not looked at.

        Raises:
            DeviceLostError: a rank has ended.
        """
        left, parts = message if self.ranks.rank == 0 else b"", []
        while True:  # pieces: the first bytes say how many are left from the piece's first on
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
        """Wait until every rank is here.

        Raises:
            DeviceLostError: a rank has ended.
        """
        if self._meet(self.handle) == LOST:
            raise DeviceLostError(LOST_WORDS)

    def lose(self) -> None:
        """A rank has ended: wake who waits for it. For another thread."""
        self._lose(self.handle)


def shared_bytes(library: Library, size: int) -> int:
    """Of the memory that so many ranks share."""
    needed: int = library.function("penstock_ranks_bytes", "ll", ctypes.c_int64)(size, SLOT_BYTES)
    return needed


def shared_file(library: Library, size: int) -> int:
    """A descriptor of new memory for so many ranks, which their processes inherit."""
    file = os.memfd_create("penstock-ranks", os.MFD_CLOEXEC)
    os.ftruncate(file, shared_bytes(library, size))
    return file
