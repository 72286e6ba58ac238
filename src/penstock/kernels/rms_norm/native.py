"""RMS normalisation by the native kernel, `csrc/norm.cpp`. Results are rounded once, where they are written."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock import native


def takes(x: Tensor) -> bool:
    """Whether the kernel works on `x`."""
    return x.is_cpu and native.supports(x.dtype) and x.is_contiguous() and native.library() is not None


@functools.cache
def _function() -> Callable[..., Any]:
    library = native.library()
    assert library is not None
    return library.function("penstock_rms_norm", "ppppillf")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `penstock.kernels.rms_norm`."""
    out = torch.empty_like(x)
    _call(x, None, out, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `penstock.kernels.rms_norm`; both results lie where the arguments were."""
    assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
    assert residual.is_contiguous()
    _call(x, residual, x, weight, eps)
    return x, residual


def _call(x: Tensor, residual: Tensor | None, out: Tensor, weight: Tensor, eps: float) -> None:
    columns = x.shape[-1]
    _function()(
        x.data_ptr(),
        native.address(residual),
        out.data_ptr(),
        weight.data_ptr(),
        native.dtype_code(x.dtype),
        x.numel() // columns,
        columns,
        eps,
    )
