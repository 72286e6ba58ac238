"""The gated delta net of Qwen3-Next and Qwen3.5."""

from collections.abc import Iterator

from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.kernels.recurrent import ConvColumns, ConvWeight, DeltaShape, Gates
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.gated_delta_net_spec import GatedDeltaNetSpec
from penstock.layers.linear import Linear
from penstock.layers.spec import StepInputs
from penstock.quantization.base import WeightFactory
from penstock.quantization.rows import Piece, RowRun


class GatedDeltaNet:
    """Linear attention: projection, short convolution, gated delta rule, gated norm. `output` projects back.

        | queries | keys | values | gates | rates | time steps |      columns after the projection

    See `Mixer`.
    """

    def __init__(self, spec: GatedDeltaNetSpec, factory: WeightFactory) -> None:
        self._spec, self._ops = spec.share(factory.ranks.size), factory.ops
        names, sizes = spec.inputs
        keys, values, heads = spec.key_heads * spec.key_dim, spec.value_size, spec.value_heads
        qkv, gates, rates = (Piece(keys), Piece(keys), Piece(values)), (Piece(values),), (Piece(heads),)
        kinds = {"all": ((*qkv, *gates), (*rates, *rates)), "rates": (qkv, gates, (*rates, *rates))}
        pieces = kinds.get(spec.together, (qkv, gates, rates, rates))
        self._input = Linear(names, spec.hidden_size, sizes, factory, bias=False, pieces=pieces)
        if spec.together == "all":
            factory.reorder_rows(names[0], tuple(_by_kind(spec)))
        if spec.together != "none":
            factory.reorder_rows(names[-1], tuple(_by_gate(spec)))
        self.output = Linear(
            (spec.output,), values, (spec.hidden_size,), factory, bias=False, takes_own=True, gives_all=True
        )
        below = factory.at(spec.prefix)
        self._conv = ConvWeight(below.taps("conv1d", qkv, spec.kernel), None, "silu")
        self._gates = Gates(below.float32("A_log", heads), below.float32("dt_bias", heads))
        self._norm = below.tensor("norm.weight", spec.value_dim)
        own = self._spec
        self._shape = DeltaShape(own.key_heads, own.value_heads, own.key_dim, own.value_dim, own.in_turn)

    def mix(self, x: Tensor, step: StepInputs, batch: Batch, cache: AnyCache | None) -> Tensor:
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
    sizes, given, first = (keys, keys, values, values), 0, 0
    starts = []
    for size in sizes:
        starts.append(first)
        first += size * spec.key_heads
    for head in range(spec.key_heads):
        for start, size in zip(starts, sizes, strict=True):
            yield RowRun(given, start + head * size, size)
            given += size


def _by_gate(spec: GatedDeltaNetSpec) -> Iterator[RowRun]:
    """Like `_by_kind`, for rates and time steps."""
    share = spec.value_heads // spec.key_heads
    for head in range(spec.key_heads):
        yield RowRun(2 * head * share, head * share, share)
        yield RowRun((2 * head + 1) * share, spec.value_heads + head * share, share)
