"""Norms of heads, rotary positions and the KV cache in one native call: `csrc/rotary_store.cpp`."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock import native
from penstock.kernels.kv_store.packed import PackedBatch, PackedCache
from penstock.kernels.rotary_store.reference import HeadNorms


@functools.cache
def _function() -> Callable[..., Any]:
    library = native.library()
    assert library is not None
    return library.function("penstock_rotate_and_store", "pppilplppf")


def rotate_and_store(
    qkv: Tensor, num_heads: int, norms: HeadNorms | None, angles: Tensor, batch: PackedBatch, cache: PackedCache
) -> Tensor:
    """See `penstock.kernels.rotary_store`; the queries come in `qkv` itself."""
    if norms is None:
        query_norm, key_norm, eps = None, None, 0.0
    else:
        query_norm, key_norm, eps = norms.query.data_ptr(), norms.key.data_ptr(), norms.eps
    _function()(
        cache.handle,
        batch.handle,
        qkv.data_ptr(),
        native.dtype_code(qkv.dtype),
        num_heads,
        angles.data_ptr(),
        angles.shape[2],
        query_norm,
        key_norm,
        eps,
    )
    return qkv
