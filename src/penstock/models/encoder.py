"""The encoder: takes the token ids of whole texts, and returns one vector per text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.encoder_config import Pooling
from penstock.kernels.elementwise import Columns
from penstock.layers.embedding import Embedding
from penstock.layers.encoder_spec import DenseSpec, EncoderSpec, HeadPart, TableSpec, TokenScoreHead
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.layers.spec import NormSpec
from penstock.models.decoder import DecoderLayer, PositionTables, Residual, Stream
from penstock.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.memory import Store
    from penstock.kernels.ops import Ops
    from penstock.quantization.base import WeightFactory

Rows = NDArray[np.float32]
Span = tuple[int, int]
"""The index of a text's first token, and of the token after its last."""


class Encoder:
    """Computes the hidden states of a step's texts, and their vectors. The loader fills the weights.

    `forward` is also called once with recorded tensors, which have no content: see `Decoder`.
    """

    def __init__(self, spec: ModelSpec, max_positions: int, factory: WeightFactory) -> None:
        """
        Args:
            max_positions: see `PositionTables`.
        """
        assert spec.encoder is not None
        self.spec, self.ends = spec, spec.encoder
        self._ops, self._dtype, ends = factory.ops, factory.dtype, spec.encoder
        self.embedding = Embedding(spec.names.embedding, spec.vocab_size, spec.hidden_size, factory)
        self._position_table = _table(ends.positions, ends.hidden_size, factory)
        self._type_table = _table(ends.token_types, ends.hidden_size, factory)
        self._norm = None if ends.norm is None else Norm(ends.norm, factory)
        self.positions = PositionTables(spec, max_positions, factory)
        """Prepared for the step's positions before `forward`."""
        self.layers = [DecoderLayer(layer, spec.residual_multiplier, factory) for layer in spec.layers]
        self._residual = Residual(spec.residual_multiplier, factory.ops)
        self._final_norm = Norm(spec.final_norm, factory)
        self._head = [_head_part(part, ends, self.embedding, factory) for part in ends.head]

    def forward(
        self, token_ids: Tensor, positions: Tensor, token_types: Tensor, batch: Batch, cache: AnyCache
    ) -> Tensor:
        """The hidden states [num_tokens, hidden_size] float32 of whole texts.

        The first three arguments are [num_tokens] int64; `positions` are rows of the position table, if the model has
        one. `cache` holds the keys and values of the step's tokens for one
        layer; each layer overwrites those of the previous one.
        """
        x = self.embedding(token_ids)
        if self.spec.embedding_multiplier != 1.0:
            x = self._ops.scale(x, self.spec.embedding_multiplier)
        for table, rows in ((self._position_table, positions), (self._type_table, token_types)):
            if table is not None:
                x = self._ops.add_rows(self._ops.gather(table, rows), x, 1.0)
        stream = Stream(x if self._norm is None else self._norm(x))
        step = self.positions.inputs(positions)
        for layer in self.layers:
            stream = layer.feed_forward(*layer.mix_tokens(stream, step, batch, cache))
        return _wide(self._residual.normed(stream, self._final_norm)[0], self._ops)

    def vectors(self, hidden: Tensor, spans: Sequence[Span]) -> Rows:
        """The vectors [texts, vector_size] of the texts whose tokens are at `spans` of `hidden`, a result of `forward`.

        Reductions are computed text by text, because the order of numpy's sums may depend on the number of rows.
        """
        rows = self._ops.on_host(hidden)
        pooled = np.stack([_pool(rows[first:last], self.ends.pooling) for first, last in spans])
        x = _converted(self._ops.from_host(pooled, hidden), self._dtype, self._ops)
        for part in self._head:
            x = part(x)
        vectors: Rows = self._ops.on_host(_wide(x, self._ops))
        return vectors

    def ignored_tensors(self) -> re.Pattern[str]:
        """A pattern of the checkpoint tensors that are not loaded."""
        return re.compile("|".join(self.spec.names.ignored))


def _wide(x: Tensor, ops: Ops) -> Tensor:
    """`x` [rows, columns] in float32."""
    import torch  # not above: a build that records sizes has no torch

    return _converted(x, torch.float32, ops)


def _converted(x: Tensor, dtype: torch.dtype, ops: Ops) -> Tensor:
    """`x` [rows, columns] in another dtype, rounded once."""
    if x.dtype == dtype:
        return x
    out = ops.empty_rows(x, (x.shape[1],), dtype)
    ops.copy_columns(x, out, Columns(0, 0, x.shape[1]))
    return out


def _table(spec: TableSpec | None, columns: int, factory: WeightFactory) -> Tensor | None:
    return None if spec is None else factory.tensor(f"{spec.name}.weight", spec.rows, columns)


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


class _Dense:
    """A linear layer on each vector, with an optional activation."""

    def __init__(self, spec: DenseSpec, factory: WeightFactory) -> None:
        self._linear = Linear((spec.name,), spec.in_size, (spec.out_size,), factory, bias=spec.bias, adaptable=False)
        self._activation, self._ops = spec.activation, factory.ops

    def __call__(self, x: Tensor) -> Tensor:
        x = self._linear(x)
        return x if self._activation is None else self._ops.activate(x, self._activation)


class _SomeRows:
    """A parameter that loads a few rows of a large checkpoint tensor."""

    def __init__(self, store: Store, target: Tensor, rows: Sequence[int], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._store, self._target, self._rows = store, target, rows

    def load(self, first: int, rows: NDArray[Any]) -> None:
        for place, row in enumerate(self._rows):
            if first <= row < first + len(rows):
                self._store(self._target, place, rows[row - first : row - first + 1])


class _TokenScoreHead:
    """The difference of two tokens' logits, or the logit of one token."""

    def __init__(self, spec: TokenScoreHead, ends: EncoderSpec, embedding: Embedding, factory: WeightFactory) -> None:
        tokens = [spec.true_token] if spec.false_token is None else [spec.true_token, spec.false_token]
        self._ids, self._ops = factory.constant(np.array(tokens, np.int64)), factory.ops
        self._embedding, self._rows = embedding, None
        if spec.output is not None:
            shape = (embedding.vocab_size, ends.hidden_size)
            self._rows = factory.empty(len(tokens), ends.hidden_size)
            factory.add_parameter(spec.output, _SomeRows(factory.ops.store, self._rows, tokens, shape))

    def __call__(self, x: Tensor) -> Tensor:
        rows = self._embedding(self._ids) if self._rows is None else self._rows
        weights, texts = (self._ops.on_host(_wide(part, self._ops)).astype(np.float64) for part in (rows, x))
        if len(weights) > 1:
            weights = weights[:1] - weights[1:]
        scores = np.array([(weights * one).sum(1) for one in texts])  # one text at a time: see `Encoder.vectors`
        return self._ops.from_host(scores.astype(np.float32), x)


def _head_part(
    part: HeadPart, ends: EncoderSpec, embedding: Embedding, factory: WeightFactory
) -> Callable[[Tensor], Tensor]:
    if isinstance(part, NormSpec):
        return Norm(part, factory)
    if isinstance(part, TokenScoreHead):
        return _TokenScoreHead(part, ends, embedding, factory)
    return _Dense(part, factory)
