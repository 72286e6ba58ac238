"""Rows times a number, by the native kernel, `csrc/gather.cpp`."""

import ctypes

from torch import Tensor

from penstock import native
from penstock.native.program import Operation, call


class _ScaleArgs(ctypes.Structure):
    """`ScaleArgs` of `csrc/ops.h`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("factor", ctypes.c_float),
    )


def scale(x: Tensor, factor: float) -> Tensor:
    """See `penstock.kernels.scale`."""
    arguments = _ScaleArgs(x=x.data_ptr(), dtype=native.dtype_code(x.dtype), columns=x.shape[1], factor=factor)
    call(x, Operation.SCALE, arguments)
    return x
