"""Attention over the packed KV cache: `csrc/attention.cpp`."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock import native
from penstock.kernels.kv_store.packed import PackedBatch, PackedCache


@functools.cache
def _function() -> Callable[..., Any]:
    library = native.library()
    assert library is not None
    return library.function("penstock_attention", "ppplipllff", ctypes.c_int32)


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
    out = torch.empty((query.shape[0], num_heads * cache.head_dim), dtype=query.dtype)
    out_of_memory = _function()(
        cache.handle,
        batch.handle,
        query.data_ptr(),
        query.stride(0),
        native.dtype_code(query.dtype),
        out.data_ptr(),
        num_heads,
        sliding_window or 0,
        scale,
        soft_cap or 0.0,
    )
    if out_of_memory:
        raise MemoryError("no memory for the scores of attention")
    return out
