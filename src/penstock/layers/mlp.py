"""The gated MLP."""

from torch import Tensor

from penstock.layers.linear import Linear
from penstock.quantization.base import Storage


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int, storage: Storage, *, bias: bool) -> None:
        both = (intermediate_size, intermediate_size)
        self.gate_up = Linear(hidden_size, both, storage, bias=bias, gated=True)
        self.down = Linear(intermediate_size, (hidden_size,), storage, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, hidden_size] -> the same shape."""
        return self.down(self.gate_up(x))
