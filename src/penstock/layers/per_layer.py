"""Per-layer embeddings (Gemma 3n and 4): a second, wide token embedding with columns for each layer.

inputs = per_layer_norm(projection(embedding)) + table[token]      | layer 0 | layer 1 | ...
x     += norm_after(projection(activation(gate(x)) * inputs[layer]))
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic

from penstock.config.feed_forward import Activation
from penstock.config.model_facts import ActivationSizes
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.embedding import OwnLookup
from penstock.layers.linear import Linear, output_linear
from penstock.layers.spec import PerLayerInput
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingSpec:
    """The wide embedding plus a projection of the usual one: `size` columns per layer."""

    vocab_size: int
    """Rows of the table; later tokens have that of token 0."""
    hidden_size: int
    size: int
    num_layers: int
    norm_eps: float
    tokens: int | None = None
    """Number of the model's tokens; None: `vocab_size`, or fewer."""
    name: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"

    @property
    def columns(self) -> int:
        """Columns of all layers."""
        return self.num_layers * self.size


@dataclass(frozen=True, slots=True)
class GatedPerLayerInputSpec:
    """projection(activation(gate(x)) * inputs of the layer). See `PerLayerInputSpec` for the methods."""

    hidden_size: int
    size: int
    first: int
    """The layer's first column of the inputs."""
    columns: int
    """Columns of the inputs of all layers."""
    activation: Activation
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"

    @property
    def activation_sizes(self) -> ActivationSizes:
        total = self.size + 3 * self.columns  # the model's inputs of all layers and their two summands
        return ActivationSizes(total, total, self.size)

    @property
    def tp_divisor(self) -> int:
        return 0

    def shard(self, tp_size: int) -> GatedPerLayerInputSpec:
        return replace(self, size=-(-self.size // tp_size))

    def build(self, factory: WeightFactory[A]) -> PerLayerInput[A]:
        return GatedPerLayerInput(self, factory)


class PerLayerEmbedding(Generic[A]):
    """Computes the per-layer inputs of all layers from a step's tokens."""

    def __init__(self, spec: PerLayerEmbeddingSpec, factory: WeightFactory[A]) -> None:
        rows = max(spec.vocab_size, spec.tokens or 0)
        self._lookup = OwnLookup(rows, factory.embedding(spec.name, rows, spec.columns), factory)
        if rows > spec.vocab_size:
            factory.repeat_first_row(spec.name, spec.vocab_size)
        self._updates = factory.lookup_table(spec.name, spec.vocab_size, spec.columns, rows)
        self._projection = Linear(
            (spec.projection,), spec.hidden_size, (spec.columns,), factory, bias=False, gather_output=True
        )
        # Both summands are divided by sqrt(2). The projection is also divided by sqrt(hidden_size), which the norm
        # cancels, except in its epsilon.
        self._norm = factory.float32(f"{spec.norm}.weight", Piece(spec.size, whole=True), factor=0.5**0.5)
        self._eps = spec.norm_eps * spec.hidden_size
        self._factor = (spec.size / 2) ** 0.5
        self._num_layers, self._ops = spec.num_layers, factory.ops

    def __call__(self, token_ids: A, x: A, adapters: AdapterRows | None = None) -> A:
        """`token_ids` [num_tokens] int64, their embeddings `x` [num_tokens, hidden_size] -> [num_tokens, columns]."""
        normed = self._ops.rms_norm(self._projection(x, adapters), self._norm, self._eps, groups=self._num_layers)
        found = self._lookup(token_ids)
        if self._updates is not None and adapters is not None:
            self._updates.add(found, token_ids, adapters)
        return self._ops.add_rows(found, normed, self._factor)


class GatedPerLayerInput(Generic[A]):
    """See `GatedPerLayerInputSpec`, and `PerLayerInput`."""

    def __init__(self, spec: GatedPerLayerInputSpec, factory: WeightFactory[A]) -> None:
        self._gate = Linear((spec.gate,), spec.hidden_size, (spec.size,), factory, bias=False)
        self._projection = output_linear(spec.projection, spec.size, spec.hidden_size, factory)
        self._first = spec.first + factory.ranks.own(spec.size).start
        self._spec, self._ops = spec, factory.ops

    def __call__(self, x: A, inputs: A, adapters: AdapterRows | None = None) -> A:
        gate = self._ops.gate(self._gate(x, adapters), inputs, self._first, self._spec.activation)
        return self._projection(gate, adapters)
