"""The gated MLP."""

import torch
from torch import Tensor

from penstock.kernels.silu_mul import silu_mul
from penstock.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        both = (intermediate_size, intermediate_size)
        self.gate_up = Linear(hidden_size, both, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, (hidden_size,), bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, hidden_size] -> the same shape."""
        return self.down(silu_mul(self.gate_up(x)))
