"""The paged KV cache in the native layout (`csrc/kv_layout.h` draws it), and a step's batch as the kernels read it."""

import ctypes
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from penstock import native, reserve

IntArray = NDArray[np.int64]

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_PADDING = 256
"""Bytes behind the last block that vectors may read."""


class _PagedCache(ctypes.Structure):
    """`PagedCache` of `csrc/ops.h`."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class PackedCache:
    """One layer's keys and values, packed. `block_size` is even, `head_dim` a multiple of 4."""

    MAX_HEAD_DIM: ClassVar[int] = 512

    def __init__(
        self, blocks: NDArray[np.uint8], block_size: int, num_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        assert block_size % 2 == head_dim % 4 == 0 < head_dim <= self.MAX_HEAD_DIM
        self.blocks = blocks
        """[num_blocks, bytes]: the layer's part of each block."""
        kind, (block_stride, _) = _KINDS[dtype], blocks.strides
        self._struct = _PagedCache(num_heads, head_dim, block_size, kind, block_stride, blocks.ctypes.data)
        self.dtype, self.head_dim = dtype, head_dim
        self.handle = ctypes.addressof(self._struct)
        """The address of what the kernels take."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes, but for the padding."""
        return self.blocks.nbytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, all at once: each pair is (from, to)."""
        sources, targets = np.array(pairs).T
        self.blocks[targets] = self.blocks[sources]


def packed_caches(
    num_layers: int, num_blocks: int, block_size: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[PackedCache, ...]:
    """The caches of so many layers. They share the memory, in which a block's layers lie one after another: what is
    used of it, from block 0 on, is one piece.
    """
    scales = 4 if dtype == torch.int8 else 0
    layer_bytes = 2 * block_size * num_heads * (head_dim * dtype.itemsize + scales)
    memory = reserve.zeros(num_blocks * num_layers * layer_bytes + _PADDING)
    blocks = memory[:-_PADDING].reshape(num_blocks, num_layers, layer_bytes)
    return tuple(PackedCache(blocks[:, layer], block_size, num_heads, head_dim, dtype) for layer in range(num_layers))


class Backing:
    """How much of the caches' memory the system has backed, which it does when a page is first touched.

    Were that left to the kernels, one thread would wait for a large page, and the others for that thread, layer after
    layer. Here all threads touch what a step needs. Blocks are first used in ascending order.
    """

    def __init__(self, first_layer: PackedCache) -> None:
        library = native.library()
        assert library is not None
        self._back = library.function("penstock_back", "pll")
        self._blocks = first_layer.blocks
        self.num_blocks = 0

    def extend(self, num_blocks: int) -> None:
        """Back the first `num_blocks` blocks of all layers."""
        if num_blocks > self.num_blocks:
            stride = self._blocks.strides[0]
            self._back(self._blocks.ctypes.data, self.num_blocks * stride, num_blocks * stride)
            self.num_blocks = num_blocks


class _Batch(ctypes.Structure):
    """`Batch` of `csrc/ops.h`."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_seqs", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
    )


class PackedBatch:
    """A step's ragged batch for the native kernels.

    `memory` holds int64 one column after another: the first row of each sequence and the number of rows; the keys of
    each sequence; the block tables, padded to `table_width`; the slots of the step's keys and values.
    """

    def __init__(self, memory: IntArray, num_tokens: int, num_seqs: int, table_width: int) -> None:
        assert memory.dtype == np.int64
        assert memory.flags.c_contiguous
        self._memory = memory
        query_start = memory.__array_interface__["data"][0]  # `ctypes.data` is slower
        seq_lens = query_start + 8 * (num_seqs + 1)
        block_tables = seq_lens + 8 * num_seqs
        slots = block_tables + 8 * num_seqs * table_width
        assert slots + 8 * num_tokens <= query_start + memory.nbytes
        self._struct = _Batch(num_tokens, num_seqs, table_width, query_start, seq_lens, block_tables, slots)
        self.handle = ctypes.addressof(self._struct)
        """The address of what the kernels take."""

    def become(self, other: "PackedBatch") -> None:
        """Be another step's batch from now on, at the same address."""
        self._memory = other._memory
        ctypes.memmove(self.handle, other.handle, ctypes.sizeof(_Batch))
