"""The gated short convolution of LFM2."""

from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.kernels.recurrent import ConvColumns, ConvWeight
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear
from penstock.layers.short_conv_spec import ShortConvSpec
from penstock.layers.spec import StepInputs
from penstock.quantization.base import WeightFactory
from penstock.quantization.rows import Piece


class ShortConv:
    """Projects to B, C and x, and computes C * conv(B * x); `output` projects back. See `Mixer`."""

    def __init__(self, spec: ShortConvSpec, factory: WeightFactory) -> None:
        hidden = spec.hidden_size
        self._input = Linear((spec.input,), hidden, (hidden,) * 3, factory, bias=spec.bias)
        self.output = Linear((spec.output,), hidden, (hidden,), factory, bias=spec.bias, takes_own=True, gives_all=True)
        bias = factory.float32(f"{spec.conv}.bias", hidden) if spec.bias else None
        self._weight = ConvWeight(factory.taps(spec.conv, (Piece(hidden),), spec.kernel), bias, None)
        own = len(factory.ranks.own(hidden))
        self._columns = ConvColumns(values=2 * own, before=0, after=own)
        self._ops = factory.ops

    def mix(self, x: Tensor, step: StepInputs, batch: Batch, cache: AnyCache | None) -> Tensor:
        assert isinstance(cache, StateCache)
        return self._ops.causal_conv(self._input(x, step.adapters), self._columns, self._weight, cache.parts[0], batch)
