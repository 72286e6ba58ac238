"""The Mamba mixer (the first version), as Jamba has it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic

from penstock.config.model_facts import ActivationSizes, StateSpec
from penstock.config.state_layout import matrix_state
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns
from penstock.kernels.recurrent import ConvColumns, ConvWeight, Gates
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import Mixer, StepInputs
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A selective scan over convolved values. See `MixerSpec` for the methods."""

    hidden_size: int
    inner_size: int
    """Columns of the values, of the gate and of the result."""
    state_size: int
    kernel: int
    """Width of the convolution in tokens."""
    rank: int
    """Columns of the low-rank time steps."""
    norm_eps: float
    """Epsilon of the norms of time steps, inputs and outputs."""
    bias: bool = False
    """Whether the first and the last projection have biases."""
    conv_bias: bool = True
    prefix: str = "mamba"
    """Prefix of its tensor names, within the layer."""
    tp_size: int = 1
    """Number of ranks that share the channels."""

    @property
    def own_size(self) -> int:
        """Number of channels of one rank."""
        return self.inner_size // self.tp_size

    @property
    def selected_size(self) -> int:
        """Columns of time steps, inputs and outputs (dt, B, C)."""
        return self.rank + 2 * self.state_size

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        memory = matrix_state(1, self.state_size, self.own_size)
        return StateSpec(((self.kernel - 1, self.own_size), memory))

    @property
    def activation_sizes(self) -> ActivationSizes:
        native = 6 * self.own_size + self.selected_size + self.rank
        return ActivationSizes(native, 8 * native, self.inner_size)

    @property
    def tp_divisor(self) -> int:
        return self.inner_size

    def shard(self, tp_size: int) -> MambaSpec:
        return replace(self, tp_size=tp_size)

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return Mamba(self, factory)


class Mamba(Generic[A]):
    """A state space model: projection, short convolution, scan, gate. `output` projects back.

        | values | gate |                       columns after the projection
        | time steps | inputs | outputs |       columns that are projected from the convolved values (dt, B, C)

    See `Mixer`.
    """

    def __init__(self, spec: MambaSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops = spec.shard(factory.ranks.size), factory.ops
        below, inner, float32 = factory.at(spec.prefix), Piece(spec.inner_size), factory.ops.dtype("float32")
        self._input = Linear(
            ("in_proj",), spec.hidden_size, (2 * spec.inner_size,), below, bias=spec.bias, pieces=((inner, inner),)
        )
        bias = below.float32("conv1d.bias", inner) if spec.conv_bias else None
        self._conv = ConvWeight(below.taps("conv1d", (inner,), spec.kernel), bias, "silu")
        self._select = Linear(
            ("x_proj",), spec.inner_size, (spec.selected_size,), below, bias=False, whole=True, gather_input=True
        )
        sizes = {"dt_layernorm": spec.rank, "b_layernorm": spec.state_size, "c_layernorm": spec.state_size}
        self._norms = [below.tensor(f"{name}.weight", size) for name, size in sizes.items()]
        self._steps = Linear(("dt_proj",), spec.rank, (spec.inner_size,), below, bias=False)
        self._gates = Gates(
            below.tensor("A_log", spec.inner_size, spec.state_size, dtype=float32, pieces=(inner,)),
            below.float32("dt_proj.bias", inner),
        )
        self._skip = below.float32("D", inner)
        self.output = output_linear("out_proj", spec.inner_size, spec.hidden_size, below, bias=spec.bias)

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        assert isinstance(cache, StateCache)
        spec, ops = self._spec, self._ops
        before, memory = cache.parts
        projected = self._input(x, step.adapters)
        values = ops.causal_conv(projected, ConvColumns(0), self._conv, before, batch)
        selected, first = self._select(values, step.adapters), 0
        for weight in self._norms:
            ops.rms_norm_columns(selected, first, weight, spec.norm_eps)
            first += len(weight)
        narrow = self._part(selected, 0, spec.rank)
        steps = self._steps(narrow, step.adapters)
        seen = ops.selective_scan(values, steps, selected, spec.rank, self._gates, self._skip, memory, batch)
        return ops.gate(self._part(projected, spec.own_size, spec.own_size), seen, 0, "silu")

    def _part(self, x: A, first: int, count: int) -> A:
        """`count` columns of `x` from `first` on: [num_tokens, count]."""
        part = self._ops.empty_rows(x, (count,), x.dtype)
        self._ops.copy_columns(x, part, Columns(first, 0, count))
        return part
