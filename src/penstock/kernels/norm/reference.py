"""RMS normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467) in plain torch.

The mean is taken in float32 and the result rounded to the type of `x` before the weight is applied, as the
checkpoints were trained.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., size] over the root mean square of its last axis, times `weight` [size] -> [..., size]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float) -> tuple[Tensor, Tensor]:
    """The residual stream goes on: (norm of the sum, sum of `factor * x` and `residual`), each of the shape of `x`."""
    total = torch.add(residual, x, alpha=factor)
    return rms_norm(total, weight, eps), total
