"""The token embedding, and the output projection, which may share its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import numpy as np

from penstock.kernels.array_types import A

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.kernels.lora.rows import AdapterRows
    from penstock.quantization.base import WeightFactory


class Embedding(Generic[A]):
    """The token embedding. weight [vocab_size, hidden_size]."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, factory: WeightFactory[A]) -> None:
        self.vocab_size = vocab_size
        self._lookup = OwnLookup(vocab_size, factory.embedding(name, vocab_size, hidden_size), factory)

    def __call__(self, token_ids: A) -> A:
        """`token_ids` [num_tokens] int64 -> [num_tokens, hidden_size]."""
        return self._lookup(token_ids)


class OwnLookup(Generic[A]):
    """Looks up rows of a table that is sharded by rows among ranks; each rank sends its rows to all."""

    def __init__(self, vocab_size: int, lookup: Callable[[A], A], factory: WeightFactory[A]) -> None:
        """
        Args:
            lookup: maps row indices in this rank's shard, [n] int64, to rows [n, columns].
        """
        self._vocab_size, self._lookup, self._ops = vocab_size, lookup, factory.ops
        own = factory.ranks.own(vocab_size)
        self._places: A | None = None
        """[vocab_size] int64: index of each row in this rank's shard; 0 for rows of other ranks."""
        if factory.ranks.size > 1:
            places = np.zeros(vocab_size, np.int64)
            places[own.start : own.stop] = np.arange(len(own))
            self._places = factory.constant(places)

    def __call__(self, token_ids: A) -> A:
        if self._places is None:
            return self._lookup(token_ids)
        found = self._lookup(self._ops.gather(self._places, token_ids))
        return self._ops.collective.rows(found, token_ids, self._vocab_size)


class OutputHead(Generic[A]):
    """The projection of hidden states to logits (`lm_head`); with tied embeddings also the token embedding.

    `name` is then that of the embedding.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        factory: WeightFactory[A],
        *,
        bias: str | None = None,
        adapted: str | None = None,
    ) -> None:
        """
        Args:
            bias: name of the bias, without `.bias`; None: there is none.
            adapted: name under which LoRA adapters target the projection; None: they cannot.
        """
        # Every step multiplies all of it. With fewer bits, rounding the weights costs more than 8-bit activations do.
        self.weight = factory.precise(least_bits=8).matrix(name, vocab_size, hidden_size)
        self._bias = None if bias is None else factory.bias((bias,), (vocab_size,), self.weight.bias_dtype)
        self._lookup = OwnLookup(vocab_size, self.weight.lookup, factory)
        self._lora = None
        if adapted is not None:
            self._lora = factory.lora((adapted,), (vocab_size,), hidden_size, self.weight)
        self._vocab_size, self._collective = vocab_size, factory.ops.collective
        self._logits_dtype = factory.logits_dtype

    def __call__(self, token_ids: A) -> A:
        """Look up embeddings, like `Embedding`."""
        return self._lookup(token_ids)

    def logits(self, hidden: A, adapters: AdapterRows | None = None) -> A:
        """`hidden` [rows, hidden_size] -> [rows, vocab_size] float32; with several ranks only rank 0 gets them.

        Args:
            adapters: the LoRA adapters of the rows.
        """
        update = None if self._lora is None or adapters is None else self._lora.update(hidden, adapters)
        own = self.weight.linear(hidden, self._bias, self._logits_dtype, update)
        if self._collective.ranks.size == 1:
            return own
        return self._collective.columns(own, self._vocab_size, first_only=True)
