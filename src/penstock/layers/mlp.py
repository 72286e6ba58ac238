"""MLPs, gated and plain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.feed_forward import Activation
from penstock.config.model_facts import ActivationSizes
from penstock.layers.clipped import ClippedLinear
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import FeedForward
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.native.array import AnyArray
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class GatedMLPSpec:
    """down(activation(gate(x)) * up(x)). See `FeedForwardSpec` for the methods. The default names are Llama's."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Names within the layer: one per matrix, or a single name if the checkpoint stores them fused."""
    down: str = "mlp.down_proj"
    clipped: bool = False
    """Whether the inputs and outputs of the maps are limited; see `ClippedLinear`."""

    @property
    def activation_sizes(self) -> ActivationSizes:
        return ActivationSizes(self.intermediate_size, 3 * self.intermediate_size, self.intermediate_size)

    @property
    def tp_divisor(self) -> int:
        return 0

    def shard(self, tp_size: int) -> GatedMLPSpec:
        return replace(self, intermediate_size=-(-self.intermediate_size // tp_size))

    def build(self, factory: WeightFactory) -> FeedForward:
        return ClippedGatedMLP(self, factory) if self.clipped else GatedMLP(self, factory)


@dataclass(frozen=True, slots=True)
class PlainMLPSpec:
    """down(activation(up(x))). See `FeedForwardSpec` for the methods."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: Activation = "relu2"
    xielu: str | None = None
    """Prefix of the parameters of xIELU, which replaces `activation`; None: another activation."""

    @property
    def activation_sizes(self) -> ActivationSizes:
        return ActivationSizes(self.intermediate_size, 2 * self.intermediate_size, self.intermediate_size)

    @property
    def tp_divisor(self) -> int:
        return 0

    def shard(self, tp_size: int) -> PlainMLPSpec:
        return replace(self, intermediate_size=-(-self.intermediate_size // tp_size))

    def build(self, factory: WeightFactory) -> FeedForward:
        return PlainMLP(self, factory)


class GatedMLP:
    """down(activation(gate(x)) * up(x)), with gate and up fused into one matrix. See `FeedForward`."""

    def __init__(self, spec: GatedMLPSpec, factory: WeightFactory) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(
            spec.gate_up, hidden, (inner, inner), factory, bias=spec.bias, gated=True, activation=spec.activation
        )
        self.down = output_linear(spec.down, inner, hidden, factory, bias=spec.bias)

    def __call__(self, x: AnyArray, adapters: AdapterRows | None = None) -> AnyArray:
        return self.down(self.gate_up(x, adapters), adapters)


class PlainMLP:
    """down(activation(up(x))). See `FeedForward`."""

    def __init__(self, spec: PlainMLPSpec, factory: WeightFactory) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        fused = spec.activation if spec.xielu is None else None
        self.up = Linear((spec.up,), hidden, (inner,), factory, bias=spec.bias, activation=fused)
        self.down = output_linear(spec.down, inner, hidden, factory, bias=spec.bias)
        self._activate, self._alphas = factory.ops.activate, None
        if spec.xielu is not None:
            alphas = [factory.float32(f"{spec.xielu}.{name}", Piece(1, whole=True)) for name in ("alpha_p", "alpha_n")]
            self._alphas = (alphas[0], alphas[1])

    def __call__(self, x: AnyArray, adapters: AdapterRows | None = None) -> AnyArray:
        inner = self.up(x, adapters)
        if self._alphas is not None:
            inner = self._activate(inner, "xielu", alphas=self._alphas)
        return self.down(inner, adapters)


class ClippedGatedMLP:
    """down(activation(gate(x)) * up(x)), each map with limits. See `FeedForward`."""

    def __init__(self, spec: GatedMLPSpec, factory: WeightFactory) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._gate, self._up = (ClippedLinear((name,), hidden, (inner,), factory) for name in spec.gate_up)
        self._down = ClippedLinear((spec.down,), inner, (hidden,), factory)
        self._activation, self._ops = spec.activation, factory.ops

    def __call__(self, x: AnyArray, adapters: AdapterRows | None = None) -> AnyArray:
        return self._down(self._ops.gate(self._gate(x), self._up(x), 0, self._activation))
