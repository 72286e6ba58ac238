"""LFM2's gated short convolution."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic

from penstock.config.model_facts import ActivationSizes, StateSpec
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.recurrent import ConvColumns, ConvWeight
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import Mixer, StepInputs
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """C * conv(B * x), where B, C and x are projections of the hidden states. See `MixerSpec` for the methods."""

    hidden_size: int
    kernel: int
    """Width of the convolution in tokens."""
    bias: bool = False
    """Whether the projections and the convolution have biases."""
    input: str = "conv.in_proj"
    conv: str = "conv.conv"
    output: str = "conv.out_proj"
    tp_size: int = 1
    """Number of ranks that share the channels."""

    @property
    def own_size(self) -> int:
        """Number of channels of one rank."""
        return self.hidden_size // self.tp_size

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        return StateSpec(((self.kernel - 1, self.own_size),))

    @property
    def activation_sizes(self) -> ActivationSizes:
        return ActivationSizes(4 * self.hidden_size, 20 * self.hidden_size, self.hidden_size)

    @property
    def tp_divisor(self) -> int:
        return self.hidden_size

    def shard(self, tp_size: int) -> ShortConvSpec:
        return replace(self, tp_size=tp_size)

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return ShortConv(self, factory)


class ShortConv(Generic[A]):
    """Projects to B, C and x, and computes C * conv(B * x); `output` projects back. See `Mixer`."""

    def __init__(self, spec: ShortConvSpec, factory: WeightFactory[A]) -> None:
        hidden = spec.hidden_size
        self._input = Linear((spec.input,), hidden, (hidden,) * 3, factory, bias=spec.bias)
        self.output = output_linear(spec.output, hidden, hidden, factory, bias=spec.bias)
        bias = factory.float32(f"{spec.conv}.bias", hidden) if spec.bias else None
        self._weight = ConvWeight(factory.taps(spec.conv, (Piece(hidden),), spec.kernel), bias, None)
        own = len(factory.ranks.own(hidden))
        self._columns = ConvColumns(values=2 * own, before=0, after=own)
        self._ops = factory.ops

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        assert isinstance(cache, StateCache)
        return self._ops.causal_conv(self._input(x, step.adapters), self._columns, self._weight, cache.parts[0], batch)
