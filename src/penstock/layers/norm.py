"""RMS normalisation as a layer."""

import torch
from torch import Tensor

from penstock.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
    """Normalises the last axis. weight [size]."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of `x + residual`, `x + residual`)."""
        return add_rms_norm(x, residual, self.weight, self.eps)
