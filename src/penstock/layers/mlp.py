"""MLP layers, gated and plain."""

from torch import Tensor

from penstock.kernels.lora.rows import AdapterRows
from penstock.layers.linear import Linear
from penstock.layers.mlp_spec import GatedMLPSpec, PlainMLPSpec
from penstock.quantization.base import WeightFactory


class GatedMLP:
    """down(activation(gate(x)) * up(x)), with gate and up fused into one matrix. See `FeedForward`."""

    def __init__(self, spec: GatedMLPSpec, factory: WeightFactory) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(
            spec.gate_up, hidden, (inner, inner), factory, bias=spec.bias, gated=True, activation=spec.activation
        )
        self.down = Linear((spec.down,), inner, (hidden,), factory, bias=spec.bias, takes_own=True, gives_all=True)

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.down(self.gate_up(x, adapters), adapters)


class PlainMLP:
    """down(activation(up(x))). See `FeedForward`."""

    def __init__(self, spec: PlainMLPSpec, factory: WeightFactory) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.up = Linear((spec.up,), hidden, (inner,), factory, bias=spec.bias, activation=spec.activation)
        self.down = Linear((spec.down,), inner, (hidden,), factory, bias=spec.bias, takes_own=True, gives_all=True)

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.down(self.up(x, adapters), adapters)
