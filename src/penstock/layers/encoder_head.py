"""The layers on an encoder's pooled vectors: linear layers, or the score of a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from penstock.checkpoint.encoder_config import HeadActivation
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns
from penstock.layers.linear import Linear
from penstock.native.array import dtype_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.kernels.memory import Store
    from penstock.kernels.ops import Ops
    from penstock.layers.embedding import Embedding
    from penstock.native.array import AnyDtype
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer on pooled vectors, with an optional activation."""

    name: str
    """In the checkpoint, without `.weight`."""
    in_size: int
    out_size: int
    bias: bool
    activation: HeadActivation | None = None


@dataclass(frozen=True, slots=True)
class TokenScoreSpec:
    """A language model's answer to a yes-or-no question: the logit of one token minus that of another."""

    true_token: int
    false_token: int | None
    output: str | None
    """Name of the output projection, without `.weight`; None: it is tied to the embedding."""
    num_rows: int | None = None
    """Rows of the output projection; None: those of the embedding."""


class Dense(Generic[A]):
    """A linear layer on each vector, with an optional activation."""

    def __init__(self, spec: DenseSpec, factory: WeightFactory[A]) -> None:
        self._linear = Linear((spec.name,), spec.in_size, (spec.out_size,), factory, bias=spec.bias, adaptable=False)
        self._activation, self._ops = spec.activation, factory.ops

    def __call__(self, x: A) -> A:
        x = self._linear(x)
        return x if self._activation is None else self._ops.activate(x, self._activation)


class TokenScoreHead(Generic[A]):
    """The difference of two tokens' logits, or the logit of one token."""

    def __init__(
        self, spec: TokenScoreSpec, hidden_size: int, embedding: Embedding[A], factory: WeightFactory[A]
    ) -> None:
        tokens = [spec.true_token] if spec.false_token is None else [spec.true_token, spec.false_token]
        self._ids, self._ops = factory.constant(np.array(tokens, np.int64)), factory.ops
        self._embedding, self._rows = embedding, None
        if spec.output is not None:
            shape = (spec.num_rows or embedding.vocab_size, hidden_size)
            self._rows = factory.empty(len(tokens), hidden_size)
            factory.add_parameter(spec.output, _SomeRows(factory.ops.store, self._rows, tokens, shape))

    def __call__(self, x: A) -> A:
        rows = self._embedding(self._ids) if self._rows is None else self._rows
        weights, texts = (self._ops.on_host(wide(part, self._ops)).astype(np.float64) for part in (rows, x))
        if len(weights) > 1:
            weights = weights[:1] - weights[1:]
        scores = np.array([(weights * text).sum(1) for text in texts])  # one text at a time: see `Encoder.vectors`
        return self._ops.from_host(scores.astype(np.float32), x)


class _SomeRows(Generic[A]):
    """A parameter that loads a few rows of a large checkpoint tensor."""

    def __init__(self, store: Store[A], target: A, rows: Sequence[int], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._store, self._target, self._rows = store, target, rows

    def load(self, first: int, rows: NDArray[Any]) -> None:
        for place, row in enumerate(self._rows):
            if first <= row < first + len(rows):
                self._store(self._target, place, rows[row - first : row - first + 1])


def wide(x: A, ops: Ops[A]) -> A:
    """`x` [rows, columns] in float32."""

    return converted(x, ops.dtype("float32"), ops)


def converted(x: A, dtype: AnyDtype, ops: Ops[A]) -> A:
    """`x` [rows, columns] in another dtype, rounded once."""
    if dtype_name(x.dtype) == dtype_name(dtype):
        return x
    out = ops.empty_rows(x, (x.shape[1],), dtype)
    ops.copy_columns(x, out, Columns(0, 0, x.shape[1]))
    return out
