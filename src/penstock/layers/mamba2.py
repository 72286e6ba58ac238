"""Mamba 2's mixer, as a layer."""

from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.kernels.recurrent import ConvColumns, ConvWeight, Gates, ScanShape
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear
from penstock.layers.mamba2_spec import Mamba2Spec
from penstock.layers.spec import StepInputs
from penstock.quantization.base import WeightFactory


class Mamba2:
    """Projects, convolves values, inputs and outputs, scans, gates and norms; `output` projects back.

        | gate | values | inputs | outputs | time steps |      columns of what is projected

    See `Mixer`.
    """

    def __init__(self, spec: Mamba2Spec, factory: WeightFactory) -> None:
        self._spec, self._ops = spec, factory.ops
        below = factory.at(spec.prefix)
        self._input = Linear(("in_proj",), spec.hidden_size, (spec.projected_size,), below, bias=spec.bias)
        self.output = Linear(("out_proj",), spec.inner_size, (spec.hidden_size,), below, bias=spec.bias)
        bias = below.float32("conv1d.bias", spec.conv_size) if spec.conv_bias else None
        self._conv = ConvWeight(below.taps("conv1d", spec.conv_size, spec.kernel), bias, "silu")
        self._gates = Gates(below.float32("A_log", spec.heads), below.float32("dt_bias", spec.heads))
        self._skip = below.float32("D", spec.heads)
        self._norm = below.tensor("norm.weight", spec.inner_size)
        self._shape = ScanShape(
            spec.heads, spec.head_dim, spec.groups, spec.state_size, spec.shortest_step, spec.longest_step
        )

    def mix(self, x: Tensor, step: StepInputs, batch: Batch, cache: AnyCache | None) -> Tensor:
        assert isinstance(cache, StateCache)
        spec, ops = self._spec, self._ops
        values, memory = cache.parts
        projected = self._input(x)
        xbc = ops.causal_conv(projected, ConvColumns(spec.inner_size), self._conv, values, batch)
        first_step = spec.inner_size + spec.conv_size
        seen = ops.state_space_scan(xbc, projected, first_step, self._shape, self._gates, self._skip, memory, batch)
        group = spec.inner_size // spec.norm_groups
        return ops.gated_rms_norm(seen, projected, 0, self._norm, spec.norm_eps, group, gate_first=True)
