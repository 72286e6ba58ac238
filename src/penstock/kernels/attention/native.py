"""The paged KV cache in the native layout (see `csrc/kv_layout.h`), and the native operations on it."""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.config.model_facts import KVSpec
from penstock.kernels.attention import AttentionOptions, CacheShape, LayerCaches, RopeOptions
from penstock.kernels.batch import Batch
from penstock.kernels.block_bytes import BytesInPlace
from penstock.native import Library, structs
from penstock.native.array import Array, NoNativeKernelError, dtype_name
from penstock.native.program import call, empty_rows
from penstock.system.allocator import Allocator

_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
_PADDING = 256
"""Bytes after the last block that vector loads may read."""


class PackedCache:
    """The KV cache of one layer in the native layout. See `LayerCache` for the methods."""

    def __init__(self, library: Library, blocks: NDArray[np.uint8], shape: CacheShape) -> None:
        assert can_pack(shape)
        self.blocks = blocks
        """[num_blocks, bytes]: the layer's part of each block."""
        self.dtype = shape.dtype
        self._library, self._head_dim = library, shape.head_dim
        self._struct = structs.PagedCache(
            shape.num_heads,
            shape.head_dim,
            shape.block_size,
            _KINDS[dtype_name(shape.dtype)],
            blocks.strides[0],
            blocks.ctypes.data,
            shape.latent,
        )
        self._handle = ctypes.addressof(self._struct)

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        # numpy reads all sources before it writes, so a block may be both source and target.
        sources, targets = np.array(pairs).T
        self.blocks[targets] = self.blocks[sources]

    def rope_and_cache(
        self,
        qkv: Array,
        options: RopeOptions[Array],
        angles: Array | None,
        batch: Batch,
        *,
        query_factors: Array | None = None,
    ) -> Array:
        """See `LayerCache`; returns `qkv` itself."""
        arguments = structs.RopeArgs(
            cache=self._handle,
            batch=batch.handle,
            qkv=qkv.data_ptr(),
            dtype=native.dtype_code(qkv.dtype),
            parts=options.parts,
            value_norm=options.value_norm,
            num_heads=options.num_heads,
            query_step=self._head_dim * (1 + options.gated),
            interleaved=options.interleaved,
            query_factors=native.address(query_factors),
        )
        if angles is not None:
            arguments.angles, arguments.num_angles = angles.data_ptr(), angles.shape[2]
        if (norms := options.norms) is not None:
            arguments.query_norm, arguments.key_norm = norms.query.data_ptr(), native.address(norms.key)
            arguments.norm_dtype, arguments.eps = native.dtype_code(norms.query.dtype), norms.eps
            arguments.norm_last = norms.last
        call(self._library, qkv, arguments)
        return qkv

    def attend(self, query: Array, options: AttentionOptions[Array], batch: Batch) -> Array:
        """See `LayerCache`.

        Raises:
            MemoryError: allocating a thread's score buffer failed.
        """
        out = empty_rows(query, (options.num_heads * self._head_dim,), query.dtype)
        arguments = structs.AttentionArgs(
            cache=self._handle,
            batch=batch.handle,
            query=query.data_ptr(),
            query_stride=query.stride(0),
            query_step=self._head_dim * (1 + options.gated),
            dtype=native.dtype_code(query.dtype),
            out=out.data_ptr(),
            num_heads=options.num_heads,
            window=options.window or 0,
            bidirectional=options.bidirectional,
            takes_ends=options.takes_ends,
            chunk=options.chunk or 0,
            scale=options.scale,
            soft_cap=options.soft_cap or 0.0,
            sinks=native.address(options.sinks),
            position_bias=native.address(options.position_bias),
            bias_stride=0 if options.position_bias is None else options.position_bias.shape[1],
        )
        call(self._library, query, arguments)
        return out


def can_pack(shape: CacheShape) -> bool:
    """Whether the native layout supports a cache of this shape."""
    return not _gap(shape)


def _gap(shape: CacheShape) -> str:
    return KVSpec(shape.num_heads, shape.head_dim).gap(shape.block_size)


class AttentionKernels:
    """Allocates caches in the native layout."""

    def __init__(self, library: Library, allocator: Allocator) -> None:
        self._library, self._allocator = library, allocator

    def new_caches(self, shapes: Sequence[CacheShape]) -> LayerCaches[Array]:
        """Allocate zeroed caches.

        All layers share one allocation, ordered by block and then by layer, so that the used part, from block 0 on, is
        contiguous.

        Raises:
            NoNativeKernelError: the native layout does not support one of the shapes.
        """
        for shape in shapes:
            if gap := _gap(shape):
                raise NoNativeKernelError(gap)
        num_blocks = shapes[0].num_blocks
        ends = [0, *itertools.accumulate(map(_block_bytes, shapes))]
        # Kernels load whole vectors, beyond the end of the last block, too.
        memory = self._allocator.zeros(num_blocks * ends[-1] + _PADDING)
        blocks = memory[:-_PADDING].reshape(num_blocks, ends[-1])
        layers = tuple(
            PackedCache(self._library, blocks[:, first:last], shape)
            for shape, (first, last) in zip(shapes, itertools.pairwise(ends), strict=True)
        )
        backing = _Backing(self._library.function("penstock_back", "pll"), blocks)
        return LayerCaches(layers, backing.extend, BytesInPlace(blocks))


def _block_bytes(shape: CacheShape) -> int:
    """Bytes of one layer in a block."""
    scales = 4 if dtype_name(shape.dtype) == "int8" else 0
    entries = (2 - shape.latent) * shape.block_size * shape.num_heads
    itemsize: int = shape.dtype.itemsize
    return entries * (shape.head_dim * itemsize + scales)


class _Backing:
    """Backs the caches' memory with physical pages ahead of use, with all threads.

    The operating system backs a page when it is first touched. If the kernels touched pages first, one thread would
    wait for a huge page, and all others for that thread, in every layer. Blocks are first used in ascending order.
    """

    def __init__(self, back: Callable[..., Any], blocks: NDArray[np.uint8]) -> None:
        self._back, self._blocks, self._num_blocks = back, blocks, 0

    def extend(self, num_blocks: int) -> None:
        """Back the first `num_blocks` blocks of all layers."""
        if num_blocks > self._num_blocks:
            stride = self._blocks.strides[0]
            self._back(self._blocks.ctypes.data, self._num_blocks * stride, num_blocks * stride)
            self._num_blocks = num_blocks
