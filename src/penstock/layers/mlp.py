"""MLPs, gated and plain."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Literal

from penstock.config.feed_forward import Activation
from penstock.config.model_facts import ActivationSizes
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.clipped import ClippedLinear
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import FeedForward
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.kernels.lora.rows import AdapterRows
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
    down_bias: bool = False
    """Whether the last map has a bias, even without `bias`."""
    clipped: bool = False
    """Whether the inputs and outputs of the maps are limited; see `ClippedLinear`."""
    gate_factor: float = 1.0
    """Factor on the gate, before the activation."""

    @property
    def activation_sizes(self) -> ActivationSizes:
        columns = self.intermediate_size * (1 if self.gate_factor == 1.0 else 2)
        return ActivationSizes(columns, 3 * self.intermediate_size, self.intermediate_size)

    @property
    def tp_divisor(self) -> int:
        return 0

    def shard(self, tp_size: int) -> GatedMLPSpec:
        return replace(self, intermediate_size=-(-self.intermediate_size // tp_size))

    def build(self, factory: WeightFactory[A]) -> FeedForward[A]:
        if self.gate_factor != 1.0:
            return ScaledGatedMLP(self, factory)
        return ClippedGatedMLP(self, factory) if self.clipped else GatedMLP(self, factory)


PlainActivation = Activation | Literal["quick_gelu", "relu"]
"""quick_gelu: x * sigmoid(1.702 * x), an approximation of gelu."""
_QUICK_GELU = 1.702


@dataclass(frozen=True, slots=True)
class SparseMLPSpec:
    """down(activation(limited(gate(x))) * up(x)), where only gates far above a token's mean are not 0: `limited` is
    `Ops.keep_above`. See `FeedForwardSpec` for the methods.
    """

    mlp: GatedMLPSpec
    deviations: float
    """How many standard deviations above the mean."""

    @property
    def activation_sizes(self) -> ActivationSizes:
        inner = self.mlp.intermediate_size
        return ActivationSizes(2 * inner, 4 * inner, inner)

    @property
    def tp_divisor(self) -> int:
        return 1  # the mean is that of all columns

    def shard(self, tp_size: int) -> SparseMLPSpec:
        return self

    def build(self, factory: WeightFactory[A]) -> FeedForward[A]:
        return SparseMLP(self, factory)


@dataclass(frozen=True, slots=True)
class PlainMLPSpec:
    """down(activation(up(x))). See `FeedForwardSpec` for the methods."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: PlainActivation = "relu2"
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

    def build(self, factory: WeightFactory[A]) -> FeedForward[A]:
        return PlainMLP(self, factory)


class GatedMLP(Generic[A]):
    """down(activation(gate(x)) * up(x)), with gate and up fused into one matrix. See `FeedForward`."""

    def __init__(self, spec: GatedMLPSpec, factory: WeightFactory[A]) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(
            spec.gate_up, hidden, (inner, inner), factory, bias=spec.bias, gated=True, activation=spec.activation
        )
        self.down = output_linear(spec.down, inner, hidden, factory, bias=spec.bias or spec.down_bias)

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        return self.down(self.gate_up(x, adapters), adapters)


class ScaledGatedMLP(Generic[A]):
    """down(activation(factor * gate(x)) * up(x)). See `FeedForward`."""

    def __init__(self, spec: GatedMLPSpec, factory: WeightFactory[A]) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._gate, self._up = (Linear((name,), hidden, (inner,), factory, bias=spec.bias) for name in spec.gate_up)
        self._down = output_linear(spec.down, inner, hidden, factory, bias=spec.bias or spec.down_bias)
        self._spec, self._ops = spec, factory.ops

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        gate = self._ops.activate(self._gate(x, adapters), None, factor=self._spec.gate_factor)
        return self._down(self._ops.gate(gate, self._up(x, adapters), 0, self._spec.activation), adapters)


class SparseMLP(Generic[A]):
    """See `SparseMLPSpec`, and `FeedForward`."""

    def __init__(self, spec: SparseMLPSpec, factory: WeightFactory[A]) -> None:
        mlp, self._deviations, self._ops = spec.mlp, spec.deviations, factory.ops
        hidden, inner, self._activation = mlp.hidden_size, mlp.intermediate_size, mlp.activation
        self._gate, self._up = (Linear((name,), hidden, (inner,), factory, bias=mlp.bias) for name in mlp.gate_up)
        self._down = output_linear(mlp.down, inner, hidden, factory, bias=mlp.bias)

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        gate = self._ops.keep_above(self._gate(x, adapters), self._deviations)
        return self._down(self._ops.gate(gate, self._up(x, adapters), 0, self._activation), adapters)


class PlainMLP(Generic[A]):
    """down(activation(up(x))). See `FeedForward`."""

    def __init__(self, spec: PlainMLPSpec, factory: WeightFactory[A]) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        kind = spec.activation
        fused: Activation | None = None
        if spec.xielu is None and kind != "quick_gelu" and kind != "relu":
            fused = kind
        self.up = Linear((spec.up,), hidden, (inner,), factory, bias=spec.bias, activation=fused)
        self.down = output_linear(spec.down, inner, hidden, factory, bias=spec.bias)
        self._activate, self._alphas = factory.ops.activate, None
        self._kind = kind
        if spec.xielu is not None:
            alphas = [factory.float32(f"{spec.xielu}.{name}", Piece(1, whole=True)) for name in ("alpha_p", "alpha_n")]
            self._alphas = (alphas[0], alphas[1])

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        inner = self.up(x, adapters)
        if self._alphas is not None:
            inner = self._activate(inner, "xielu", alphas=self._alphas)
        elif self._kind == "quick_gelu":
            inner = self._activate(inner, "silu", divisor=1 / _QUICK_GELU, factor=1 / _QUICK_GELU)
        elif self._kind == "relu":
            inner = self._activate(inner, "relu")
        return self.down(inner, adapters)


class ClippedGatedMLP(Generic[A]):
    """down(activation(gate(x)) * up(x)), each map with limits. See `FeedForward`."""

    def __init__(self, spec: GatedMLPSpec, factory: WeightFactory[A]) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._gate, self._up = (ClippedLinear((name,), hidden, (inner,), factory) for name in spec.gate_up)
        self._down = ClippedLinear((spec.down,), inner, (hidden,), factory)
        self._activation, self._ops = spec.activation, factory.ops

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        return self._down(self._ops.gate(self._gate(x), self._up(x), 0, self._activation))
