"""Norms of heads, rotary positions and the KV cache in one native call: `csrc/rotary_store.cpp`."""

import ctypes

from torch import Tensor

from penstock import native
from penstock.kernels.kv_store.packed import PackedBatch, PackedCache
from penstock.kernels.rotary_store.reference import HeadNorms
from penstock.native.program import Operation, call


class _RotaryArgs(ctypes.Structure):
    """`RotaryArgs` of `csrc/ops.h`."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("num_heads", ctypes.c_int64),
        ("angles", ctypes.c_void_p),
        ("num_angles", ctypes.c_int64),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


def rotate_and_store(
    qkv: Tensor, num_heads: int, norms: HeadNorms | None, angles: Tensor, batch: PackedBatch, cache: PackedCache
) -> Tensor:
    """See `penstock.kernels.rotary_store`; the queries come in `qkv` itself."""
    arguments = _RotaryArgs(
        cache=cache.handle,
        batch=batch.handle,
        qkv=qkv.data_ptr(),
        dtype=native.dtype_code(qkv.dtype),
        num_heads=num_heads,
        angles=angles.data_ptr(),
        num_angles=angles.shape[2],
    )
    if norms is not None:
        arguments.query_norm, arguments.key_norm = norms.query.data_ptr(), norms.key.data_ptr()
        arguments.eps = norms.eps
    call(qkv, Operation.ROTATE_AND_STORE, arguments)
    return qkv
