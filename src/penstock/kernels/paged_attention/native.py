"""Attention over the packed KV cache: `csrc/attention.cpp`."""

import ctypes

from torch import Tensor

from penstock import native
from penstock.kernels.kv_store.packed import PackedBatch, PackedCache
from penstock.native.program import Operation, call, empty_rows


class _AttentionArgs(ctypes.Structure):
    """`AttentionArgs` of `csrc/ops.h`."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("scratch", ctypes.c_void_p),
    )


def paged_attention(
    query: Tensor,
    num_heads: int,
    cache: PackedCache,
    batch: PackedBatch,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """See `penstock.kernels.paged_attention`.

    Raises:
        MemoryError: there is no memory for a thread's scores.
    """
    out = empty_rows(query, (num_heads * cache.head_dim,), query.dtype)
    arguments = _AttentionArgs(
        cache=cache.handle,
        batch=batch.handle,
        query=query.data_ptr(),
        query_stride=query.stride(0),
        dtype=native.dtype_code(query.dtype),
        out=out.data_ptr(),
        num_heads=num_heads,
        window=sliding_window or 0,
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    call(query, Operation.ATTENTION, arguments)
    return out
