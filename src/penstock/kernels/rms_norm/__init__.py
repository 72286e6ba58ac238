"""Root-mean-square normalisation, alone or with the residual sum before it."""

from torch import Tensor

from penstock.kernels.rms_norm import native, reference
from penstock.native import takes_rows

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., size] over the root mean square of its last axis, times `weight` [size] -> [..., size]."""
    return native.rms_norm(x, weight, eps) if takes_rows(x) else reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """The residual stream goes on: (norm of the sum, sum of `factor * x` and `residual`), each of the shape of `x`.

    `x` and `residual` are given up: the results may lie where they were.
    """
    add_norm = native.add_rms_norm if takes_rows(x) else reference.add_rms_norm
    return add_norm(x, residual, weight, eps, factor)
