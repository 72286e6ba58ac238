"""Kimi Linear's delta attention (KDA): a gated delta rule in which each channel of the keys has a decay of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic

from penstock.config.model_facts import ActivationSizes, StateSpec
from penstock.config.state_layout import matrix_state
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns
from penstock.kernels.recurrent import ConvColumns, ConvWeight, DeltaShape, Gates
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import Mixer, StepInputs
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec:
    """Linear attention with a gated delta rule (Kimi Team, 2025, arXiv:2510.26692). See `MixerSpec` for the methods."""

    hidden_size: int
    heads: int
    head_dim: int
    """Of keys, of values, and the rank of the projections of decays and output gates."""
    kernel: int
    """Width of the convolution in tokens."""
    norm_eps: float
    prefix: str = "self_attn"
    """Prefix of its tensor names, within the layer."""

    @property
    def size(self) -> int:
        """Columns of the queries, of the keys and of the values."""
        return self.heads * self.head_dim

    @property
    def projected_size(self) -> int:
        return 3 * self.size + self.heads + 2 * self.head_dim

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        return StateSpec(((self.kernel - 1, 3 * self.size), matrix_state(self.heads, self.head_dim, self.head_dim)))

    @property
    def activation_sizes(self) -> ActivationSizes:
        native = self.projected_size + 11 * self.size + self.heads
        return ActivationSizes(native, 8 * native, self.size)

    @property
    def tp_divisor(self) -> int:
        return self.heads

    def shard(self, tp_size: int) -> KimiDeltaSpec:
        return replace(self, heads=self.heads // tp_size)

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return KimiDelta(self, factory)


class KimiDelta(Generic[A]):
    """Linear attention: projection, short convolution, gated delta rule, norm, gate. `output` projects back.

        | queries | keys | values | rates | low-rank decays | low-rank gates |      columns after the projection

    See `Mixer`.
    """

    def __init__(self, spec: KimiDeltaSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops = spec.shard(factory.ranks.size), factory.ops
        below, size, dim = factory.at(spec.prefix), spec.size, spec.head_dim
        low, columns = (Piece(dim, whole=True),), (Piece(size),) * 3
        self._input = Linear(
            ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
            spec.hidden_size,
            (size, size, size, spec.heads, dim, dim),
            below,
            bias=False,
            pieces=(*((piece,) for piece in columns), (Piece(spec.heads),), low, low),
        )
        self._decays = Linear(("f_b_proj",), dim, (size,), below, bias=False)
        self._output_gates = Linear(("g_b_proj",), dim, (size,), below, bias=False)
        self._conv = ConvWeight(below.taps(("q_conv1d", "k_conv1d", "v_conv1d"), columns, spec.kernel), None, "silu")
        self._gates = Gates(below.float32("A_log", spec.heads), below.float32("dt_bias", size))
        below.reshape("A_log", (1, 1, spec.heads, 1))
        self._norm = below.tensor("o_norm.weight", dim)
        self.output = output_linear("o_proj", size, spec.hidden_size, below)

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        assert isinstance(cache, StateCache)
        spec, ops, size, dim = self._spec, self._ops, self._spec.size, self._spec.head_dim
        before, memory = cache.parts
        projected = self._input(x, step.adapters)
        qkv = ops.causal_conv(projected, ConvColumns(0), self._conv, before, batch)
        first = 3 * size + spec.heads
        decays = self._decays(self._part(projected, first, dim), step.adapters)
        gates = ops.empty_rows(x, (spec.heads + size,), x.dtype)
        ops.copy_columns(projected, gates, Columns(3 * size, 0, spec.heads))
        ops.copy_columns(decays, gates, Columns(0, spec.heads, size))
        shape = DeltaShape(spec.heads, spec.heads, dim, dim, by_channel=True)
        seen = ops.gated_delta_rule(qkv, gates, 0, shape, self._gates, memory, batch)
        normed = ops.rms_norm(seen, self._norm, spec.norm_eps, groups=spec.heads)
        wide = self._output_gates(self._part(projected, first + dim, dim), step.adapters)
        spread = ops.empty_rows(x, (2 * size,), x.dtype)  # as `Ops.head_gates` takes them
        ops.copy_columns(wide, spread, Columns(0, dim, dim, spec.heads, step=dim, to_step=2 * dim))
        return ops.head_gates(normed, spread, spec.heads)

    def _part(self, x: A, first: int, count: int) -> A:
        """`count` columns of `x` from `first` on: [num_tokens, count]."""
        part = self._ops.empty_rows(x, (count,), x.dtype)
        self._ops.copy_columns(x, part, Columns(first, 0, count))
        return part
