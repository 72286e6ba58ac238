"""Per-layer embeddings; see `per_layer_spec.py`."""

import torch
from torch import Tensor

from penstock.layers.embedding import OwnLookup
from penstock.layers.linear import Linear
from penstock.layers.per_layer_spec import GatedPerLayerInputSpec, PerLayerEmbeddingSpec
from penstock.quantization.base import WeightFactory


class PerLayerEmbedding:
    """Computes the per-layer inputs of all layers from a step's tokens."""

    def __init__(self, spec: PerLayerEmbeddingSpec, factory: WeightFactory) -> None:
        self._lookup = OwnLookup(spec.vocab_size, factory.embedding(*spec.table), factory)
        self._projection = Linear(
            (spec.projection,), spec.hidden_size, (spec.columns,), factory, bias=False, gives_all=True
        )
        # Both summands are divided by sqrt(2). The projection is also divided by sqrt(hidden_size), which the norm
        # cancels, except in its epsilon.
        self._norm = factory.tensor(f"{spec.norm}.weight", spec.size, dtype=torch.float32, factor=0.5**0.5)
        self._eps = spec.norm_eps * spec.hidden_size
        self._factor = (spec.size / 2) ** 0.5
        self._num_layers, self._ops = spec.num_layers, factory.ops

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """`token_ids` [num_tokens] int64, their embeddings `x` [num_tokens, hidden_size] -> [num_tokens, columns]."""
        normed = self._ops.rms_norm(self._projection(x), self._norm, self._eps, groups=self._num_layers)
        return self._ops.add_rows(self._lookup(token_ids), normed, self._factor)


class GatedPerLayerInput:
    """See `GatedPerLayerInputSpec`, and `PerLayerInput`."""

    def __init__(self, spec: GatedPerLayerInputSpec, factory: WeightFactory) -> None:
        self._gate = Linear((spec.gate,), spec.hidden_size, (spec.size,), factory, bias=False)
        self._projection = Linear(
            (spec.projection,), spec.size, (spec.hidden_size,), factory, bias=False, takes_own=True, gives_all=True
        )
        self._first = spec.first + factory.ranks.own(spec.size).start
        self._spec, self._ops = spec, factory.ops

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        gate = self._ops.gate(self._gate(x), inputs, self._first, self._spec.activation)
        return self._projection(gate)
