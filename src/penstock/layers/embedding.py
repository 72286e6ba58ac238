"""Token embedding, and the output projection that may share its weight."""

import torch
from torch import Tensor

from penstock.quantization.base import WeightFactory


class Embedding:
    """A row a token. weight [vocab_size, hidden_size]."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, factory: WeightFactory) -> None:
        self.vocab_size = vocab_size
        self._lookup = factory.embedding(name, vocab_size, hidden_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [num_tokens] int64 -> [num_tokens, hidden_size]."""
        return self._lookup(token_ids)


class OutputHead:
    """The projection of hidden states to logits, which can also look tokens up where the embedding is tied to it.

    `name` is then that of the embedding.
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, factory: WeightFactory, *, bias: bool = False
    ) -> None:
        self.weight = factory.head(name, vocab_size, hidden_size)
        self._bias = factory.bias((name,), (vocab_size,), self.weight.bias_dtype) if bias else None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """As `Embedding`'s."""
        return self.weight.lookup(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [rows, hidden_size] -> [rows, vocab_size], in float32."""
        return self.weight.linear(hidden, self._bias, torch.float32)
