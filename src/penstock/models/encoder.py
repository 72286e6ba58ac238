"""The encoder: takes the token ids of whole texts, and returns one vector per text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.encoder_config import Pooling
from penstock.kernels.array_types import A
from penstock.layers.convolution import TokenConvolution
from penstock.layers.disentangled import DistanceVectors
from penstock.layers.embedding import Embedding
from penstock.layers.encoder_head import Dense, TokenScoreHead, TokenScoreSpec, converted, wide
from penstock.layers.norm import Norm
from penstock.layers.spec import NormSpec
from penstock.models.decoder import DecoderLayer, PositionTables
from penstock.models.spec import EncoderSpec, HeadPart, ModelSpec, TableSpec
from penstock.models.stream import Residual, Stream

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory

Rows = NDArray[np.float32]
Span = tuple[int, int]
"""The index of a text's first token, and of the token after its last."""


class Encoder(Generic[A]):
    """Computes the hidden states of a step's texts, and their vectors. The loader fills the weights.

    `forward` is also called once with recorded tensors, which have no content: see `Decoder`.
    """

    def __init__(self, spec: ModelSpec, max_positions: int, factory: WeightFactory[A]) -> None:
        """
        Args:
            max_positions: see `PositionTables`.
        """
        assert spec.encoder is not None
        self.spec, self.ends = spec, spec.encoder
        self._ops, self._dtype, ends = factory.ops, factory.dtype, spec.encoder
        self.embedding = Embedding(spec.names.embedding, spec.vocab_size, ends.embedding_size, factory)
        self._position_table = _table(ends.positions, ends.embedding_size, factory)
        self._type_table = _table(ends.token_types, ends.embedding_size, factory)
        self._norm = None if ends.norm is None else Norm(ends.norm, factory)
        self._projection = None if ends.projection is None else Dense(ends.projection, factory)
        self.positions = PositionTables(spec, max_positions, factory)
        """Prepared for the step's positions before `forward`."""
        self._distances = None
        if ends.distances is not None:
            self._distances = DistanceVectors(ends.distances, max_positions, factory)
        self._convolution = None
        if ends.convolution is not None:
            self._convolution = TokenConvolution(ends.convolution, factory)
            self._convolution_norm = Norm(ends.convolution.norm_of_sum, factory)
        self.layers = [DecoderLayer(layer, spec.residual_multiplier, factory) for layer in spec.layers]
        self._residual = Residual(spec.residual_multiplier, factory.ops)
        self._final_norm = Norm(spec.final_norm, factory)
        self._head = [_head_part(part, ends, self.embedding, factory) for part in ends.head]

    def forward(self, token_ids: A, positions: A, token_types: A, batch: Batch, cache: AnyCache[A] | None) -> A:
        """The hidden states [num_tokens, hidden_size] float32 of whole texts.

        The first three arguments are [num_tokens] int64; `positions` are rows of the position table, if the model has
        one. `cache` holds the keys and values of the step's tokens for one
        layer; each layer overwrites those of the previous one. None: the layers need none.
        """
        x = self.embedding(token_ids)
        if self.spec.embedding_multiplier != 1.0:
            x = self._ops.activate(x, None, factor=self.spec.embedding_multiplier)
        for table, rows in ((self._position_table, positions), (self._type_table, token_types)):
            if table is not None:
                x = self._ops.add_rows(self._ops.gather(table, rows), x, 1.0)
        x = x if self._norm is None else self._norm(x)
        stream = Stream(x if self._projection is None else self._projection(x))
        step = self.positions.inputs(positions)
        if self._distances is not None:
            step = replace(step, distances=self._distances())
        beside = None if self._convolution is None else self._convolution(stream.x, batch)
        for layer in self.layers:
            stream = layer.feed_forward(*layer.mix_tokens(stream, step, batch, cache))
            if beside is not None:  # of the first layer
                both = Stream(beside, self._residual.added(stream))
                stream, beside = Stream(self._residual.normed(both, self._convolution_norm)[0]), None
        return wide(self._residual.normed(stream, self._final_norm)[0], self._ops)

    def vectors(self, hidden: A, spans: Sequence[Span]) -> Rows:
        """The vectors [texts, vector_size] of the texts whose tokens are at `spans` of `hidden`, a result of `forward`.

        Reductions are computed text by text, because the order of numpy's sums may depend on the number of rows.
        """
        rows = self._ops.on_host(hidden)
        pooled = np.stack([_pool(rows[first:last], self.ends.pooling) for first, last in spans])
        x = converted(self._ops.from_host(pooled, hidden), self._dtype, self._ops)
        for part in self._head:
            x = part(x)
        vectors: Rows = self._ops.on_host(wide(x, self._ops))
        return vectors

    def ignored_tensors(self) -> re.Pattern[str]:
        """A pattern of the checkpoint tensors that are not loaded."""
        return re.compile("|".join(self.spec.names.ignored))


def _table(spec: TableSpec | None, columns: int, factory: WeightFactory[A]) -> A | None:
    if spec is None:
        return None
    table = factory.tensor(f"{spec.name}.weight", spec.rows - spec.first, columns)
    factory.skip_rows(spec.name, spec.first)
    return table


def _pool(hidden: Rows, modes: Sequence[Pooling]) -> Rows:
    """Pool `hidden` [tokens, hidden_size] to a text's vector [len(modes) * hidden_size].

    Uses numpy, because torch would wake its threads for each text.
    """
    return np.concatenate([_pooled(hidden, mode) for mode in modes])


def _pooled(hidden: Rows, mode: Pooling) -> Rows:
    pooled: Rows
    if mode in ("cls", "last"):
        pooled = hidden[0 if mode == "cls" else -1]
        return pooled
    if mode == "max":
        pooled = hidden.max(0)
        return pooled
    if mode == "weighted_mean":
        weights = np.arange(1, len(hidden) + 1, dtype=np.float64)
        total = (hidden * weights[:, None]).sum(0) / weights.sum()
    else:
        divisor = len(hidden) if mode == "mean" else len(hidden) ** 0.5
        total = hidden.sum(0, dtype=np.float64) / divisor
    pooled = total.astype(np.float32)
    return pooled


def _head_part(
    part: HeadPart, ends: EncoderSpec, embedding: Embedding[A], factory: WeightFactory[A]
) -> Callable[[A], A]:
    if isinstance(part, NormSpec):
        return Norm(part, factory)
    if isinstance(part, TokenScoreSpec):
        return TokenScoreHead(part, ends.hidden_size, embedding, factory)
    return Dense(part, factory)
