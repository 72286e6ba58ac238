"""RMS normalisation by the native kernel, `csrc/norm.cpp`. Results are rounded once, where they are written."""

import ctypes

from torch import Tensor

from penstock import native
from penstock.native.program import Operation, call, empty_rows


class _NormArgs(ctypes.Structure):
    """`NormArgs` of `csrc/ops.h`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("factor", ctypes.c_float),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `penstock.kernels.rms_norm`."""
    out = empty_rows(x, (x.shape[1],), x.dtype)
    _call(x, None, out, weight, eps, 1.0)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float) -> tuple[Tensor, Tensor]:
    """See `penstock.kernels.rms_norm`; both results lie where the arguments were."""
    assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
    assert residual.is_contiguous()
    _call(x, residual, x, weight, eps, factor)
    return x, residual


def _call(x: Tensor, residual: Tensor | None, out: Tensor, weight: Tensor, eps: float, factor: float) -> None:
    arguments = _NormArgs(
        x=x.data_ptr(),
        residual=native.address(residual),
        y=out.data_ptr(),
        weight=weight.data_ptr(),
        dtype=native.dtype_code(x.dtype),
        columns=x.shape[1],
        eps=eps,
        factor=factor,
    )
    call(x, Operation.RMS_NORM, arguments)
