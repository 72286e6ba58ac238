"""The gated MLP."""

from torch import Tensor

from penstock.layers.linear import Linear
from penstock.quantization.base import WeightFactory


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        factory: WeightFactory,
        *,
        bias: bool,
        gate_up_names: tuple[str, ...],
        down_name: str,
    ) -> None:
        both = (intermediate_size, intermediate_size)
        self.gate_up = Linear(gate_up_names, hidden_size, both, factory, bias=bias, gated=True)
        self.down = Linear((down_name,), intermediate_size, (hidden_size,), factory, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, hidden_size] -> the same shape."""
        return self.down(self.gate_up(x))
