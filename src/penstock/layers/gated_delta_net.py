"""The gated delta net of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Literal

from penstock.config.model_facts import ActivationSizes, StateSpec
from penstock.config.state_layout import matrix_state
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.recurrent import ConvColumns, ConvWeight, DeltaShape, Gates
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import Mixer, StepInputs
from penstock.quantization.rows import Piece, RowRun

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec:
    """Linear attention with a gated delta rule over convolved queries, keys and values.

    See `MixerSpec` for the methods. The default names are Qwen3.5's.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: each head of queries and keys serves as many value heads."""
    key_dim: int
    value_dim: int
    kernel: int
    """Width of the convolution in tokens."""
    norm_eps: float
    prefix: str = "linear_attn"
    """Prefix of its tensor names, within the layer."""
    together: Literal["none", "rates", "all"] = "none"
    """Projections that the checkpoint fuses and groups by key head. all: queries, keys, values and gates in one matrix,
    rates and time steps in another; rates: only the second of these; none: one matrix for queries, keys and values, and
    one each for gates, rates and time steps."""
    in_turn: bool = False
    """Whether value head i uses key head i % key_heads; otherwise adjacent value heads share a key head."""

    @property
    def qkv_size(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def inputs(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The names and rows of the matrices that project the hidden states."""
        qkv, values, heads = self.qkv_size, self.value_size, self.value_heads
        if self.together == "all":
            return self._within("in_proj_qkvz", "in_proj_ba"), (qkv + values, 2 * heads)
        if self.together == "rates":
            return self._within("in_proj_qkv", "in_proj_z", "in_proj_ba"), (qkv, values, 2 * heads)
        return self._within("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), (qkv, values, heads, heads)

    @property
    def output(self) -> str:
        return f"{self.prefix}.out_proj"

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        memory = matrix_state(self.value_heads, self.key_dim, self.value_dim)
        return StateSpec(((self.kernel - 1, self.qkv_size), memory))

    @property
    def activation_sizes(self) -> ActivationSizes:
        projected = sum(self.inputs[1])
        native = projected + self.qkv_size + self.value_size
        return ActivationSizes(native, 8 * native, self.value_size)

    @property
    def tp_divisor(self) -> int:
        return 1 if self.in_turn else math.gcd(self.key_heads, self.value_heads)

    def shard(self, tp_size: int) -> GatedDeltaNetSpec:
        return replace(self, key_heads=self.key_heads // tp_size, value_heads=self.value_heads // tp_size)

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return GatedDeltaNet(self, factory)

    def _within(self, *names: str) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{name}" for name in names)


class GatedDeltaNet(Generic[A]):
    """Linear attention: projection, short convolution, gated delta rule, gated norm. `output` projects back.

        | queries | keys | values | gates | rates | time steps |      columns after the projection

    See `Mixer`.
    """

    def __init__(self, spec: GatedDeltaNetSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops = spec.shard(factory.ranks.size), factory.ops
        names, sizes = spec.inputs
        keys, values, heads = spec.key_heads * spec.key_dim, spec.value_size, spec.value_heads
        qkv, gates, rates = (Piece(keys), Piece(keys), Piece(values)), (Piece(values),), (Piece(heads),)
        kinds = {"all": ((*qkv, *gates), (*rates, *rates)), "rates": (qkv, gates, (*rates, *rates))}
        pieces = kinds.get(spec.together, (qkv, gates, rates, rates))
        adaptable = not spec.in_turn  # GGUF files have the heads in another order than adapters
        self._input = Linear(names, spec.hidden_size, sizes, factory, bias=False, pieces=pieces, adaptable=adaptable)
        if spec.together == "all":
            factory.reorder_rows(names[0], tuple(_by_kind(spec)))
        if spec.together != "none":
            factory.reorder_rows(names[-1], tuple(_by_gate(spec)))
        self.output = output_linear(spec.output, values, spec.hidden_size, factory, adaptable=adaptable)
        below = factory.at(spec.prefix)
        self._conv = ConvWeight(below.taps("conv1d", qkv, spec.kernel), None, "silu")
        self._gates = Gates(below.float32("A_log", heads), below.float32("dt_bias", heads))
        self._norm = below.tensor("norm.weight", spec.value_dim)
        own = self._spec
        self._shape = DeltaShape(own.key_heads, own.value_heads, own.key_dim, own.value_dim, own.in_turn)

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        assert isinstance(cache, StateCache)
        spec, ops = self._spec, self._ops
        values, memory = cache.parts
        projected = self._input(x, step.adapters)
        qkv = ops.causal_conv(projected, ConvColumns(0), self._conv, values, batch)
        first_gate = spec.qkv_size + spec.value_size
        seen = ops.gated_delta_rule(qkv, projected, first_gate, self._shape, self._gates, memory, batch)
        return ops.gated_rms_norm(
            seen, projected, spec.qkv_size, self._norm, spec.norm_eps, spec.value_dim, gate_first=False
        )


def _by_kind(spec: GatedDeltaNetSpec) -> Iterator[RowRun]:
    """Moves of rows from the checkpoint's order, grouped by key head, to all queries, keys, values and gates."""
    keys, values = spec.key_dim, spec.value_size // spec.key_heads
    sizes, source, first = (keys, keys, values, values), 0, 0
    starts = []
    for size in sizes:
        starts.append(first)
        first += size * spec.key_heads
    for head in range(spec.key_heads):
        for start, size in zip(starts, sizes, strict=True):
            yield RowRun(source, start + head * size, size)
            source += size


def _by_gate(spec: GatedDeltaNetSpec) -> Iterator[RowRun]:
    """Like `_by_kind`, for rates and time steps."""
    share = spec.value_heads // spec.key_heads
    for head in range(spec.key_heads):
        yield RowRun(2 * head * share, head * share, share)
        yield RowRun((2 * head + 1) * share, spec.value_heads + head * share, share)
