"""The Mamba 2 mixer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Generic

from penstock.config.model_facts import ActivationSizes, StateSpec
from penstock.config.state_layout import matrix_state
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns
from penstock.kernels.recurrent import ConvColumns, ConvWeight, Gates, ScanShape
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import Mixer, StepInputs
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A state space scan over convolved values, inputs and outputs (x, B, C). See `MixerSpec` for the methods."""

    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    """Groups of inputs and outputs (B, C); each is shared by `heads / groups` adjacent heads."""
    state_size: int
    kernel: int
    """Width of the convolution in tokens."""
    norm_eps: float
    norm_groups: int
    """Number of column groups of the result that are normalized separately."""
    shortest_step: float = 0.0
    longest_step: float = float("inf")
    bias: bool = False
    """Whether the projections have biases."""
    conv_bias: bool = True
    normed: bool = True
    """Whether the result is normalized; otherwise it only has a gate."""
    gate_first: bool = True
    """Whether the gate is applied before the norm."""
    factors: tuple[float, float, float, float, float] | None = None
    """Factors on the projected gate, values, inputs, outputs and time steps."""
    prefix: str = "mamba"
    """Prefix of its tensor names, within the layer."""

    @property
    def inner_size(self) -> int:
        """Columns of the values, of the gate and of the result."""
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Columns that the convolution covers: values, inputs and outputs."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def projected_size(self) -> int:
        return self.inner_size + self.conv_size + self.heads

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        memory = matrix_state(self.heads, self.state_size, self.head_dim)
        return StateSpec(((self.kernel - 1, self.conv_size), memory))

    @property
    def activation_sizes(self) -> ActivationSizes:
        native = self.projected_size + self.conv_size + self.inner_size
        if self.factors is not None or not self.normed:
            native += self.inner_size + self.heads
        expanded = 2 * self.heads * self.state_size  # the reference expands inputs and outputs to all heads
        return ActivationSizes(native, 8 * native + 2 * expanded, self.inner_size)

    @property
    def tp_divisor(self) -> int:
        return self.heads if self.groups == 1 else math.gcd(self.heads, self.groups)

    def shard(self, tp_size: int) -> Mamba2Spec:
        return replace(self, heads=self.heads // tp_size, groups=max(1, self.groups // tp_size))

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return Mamba2(self, factory)


class Mamba2(Generic[A]):
    """A state space model: projection, short convolution, scan, gated norm. `output` projects back.

        | gate | values | inputs | outputs | time steps |      columns after the projection (z, x, B, C, dt)

    See `Mixer`.
    """

    def __init__(self, spec: Mamba2Spec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops = spec.shard(factory.ranks.size), factory.ops
        below, inner, own = factory.at(spec.prefix), Piece(spec.inner_size), self._spec
        of_groups = Piece(spec.groups * spec.state_size, whole=own.groups == spec.groups)
        conv = (inner, of_groups, of_groups)
        self._input = Linear(
            ("in_proj",),
            spec.hidden_size,
            (spec.projected_size,),
            below,
            bias=spec.bias,
            pieces=((inner, *conv, Piece(spec.heads)),),
        )
        # each norm group lies on one rank; otherwise all columns are gathered first
        self._norm_all = spec.normed and spec.norm_groups % factory.ranks.size != 0
        self._inner = spec.inner_size
        self.output = output_linear(
            "out_proj", spec.inner_size, spec.hidden_size, below, bias=spec.bias, gather_input=not self._norm_all
        )
        bias = below.float32("conv1d.bias", *conv) if spec.conv_bias else None
        of_values = None if spec.factors is None else spec.factors[1:4]
        self._conv = ConvWeight(below.taps("conv1d", conv, spec.kernel, of_values), bias, "silu")
        self._gates = Gates(below.float32("A_log", spec.heads), below.float32("dt_bias", spec.heads))
        self._skip = below.float32("D", spec.heads)
        self._norm = None
        if spec.normed:
            columns = (Piece(spec.inner_size, whole=self._norm_all),)
            self._norm = below.tensor("norm.weight", spec.inner_size, pieces=columns)
        self._group = spec.inner_size // spec.norm_groups
        self._shape = ScanShape(
            own.heads, own.head_dim, own.groups, own.state_size, own.shortest_step, own.longest_step
        )

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        assert isinstance(cache, StateCache)
        spec, ops = self._spec, self._ops
        values, memory = cache.parts
        projected = self._input(x, step.adapters)
        xbc = ops.causal_conv(projected, ConvColumns(spec.inner_size), self._conv, values, batch)
        of_gate, *_, of_steps = spec.factors or (1.0,) * 5
        steps, first_step = projected, spec.inner_size + spec.conv_size
        if of_steps != 1.0:
            steps, first_step = self._part(projected, first_step, spec.heads, of_steps), 0
        seen = ops.state_space_scan(xbc, steps, first_step, self._shape, self._gates, self._skip, memory, batch)
        gate, divided = projected, self._norm_all and ops.collective.ranks.size > 1
        if divided or of_gate != 1.0 or self._norm is None:
            gate = self._part(projected, 0, spec.inner_size, of_gate)
        if self._norm is None:
            return ops.gate(gate, seen, 0, "silu")
        if divided:
            seen, gate = (ops.collective.columns(part, self._inner) for part in (seen, gate))
        return ops.gated_rms_norm(seen, gate, 0, self._norm, spec.norm_eps, self._group, gate_first=spec.gate_first)

    def _part(self, projected: A, first: int, count: int, factor: float) -> A:
        """`count` columns of `projected` from `first` on, times `factor`: [num_tokens, count]."""
        part = self._ops.empty_rows(projected, (count,), projected.dtype)
        self._ops.copy_columns(projected, part, Columns(first, 0, count))
        return part if factor == 1.0 else self._ops.activate(part, None, factor=factor)
