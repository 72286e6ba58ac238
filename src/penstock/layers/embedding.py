"""Token embedding, and the output projection that may share its weight."""

import torch
from torch import Tensor

from penstock.quantization.base import Parameter, TensorParameter, WeightFactory


class Embedding:
    """A row a token. weight [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, factory: WeightFactory) -> None:
        self._weight = factory.tensor(vocab_size, hidden_size)
        self._gather = factory.ops.gather

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [num_tokens] int64 -> [num_tokens, hidden_size]."""
        return self._gather(self._weight, token_ids)

    def parameters(self, name: str) -> dict[str, Parameter]:
        """By its name in the checkpoint."""
        return {f"{name}.weight": TensorParameter(self._weight)}


class OutputHead:
    """The projection of hidden states to logits, which can also look tokens up where the embedding is tied to it."""

    def __init__(self, vocab_size: int, hidden_size: int, factory: WeightFactory) -> None:
        self._weight = factory.head(vocab_size, hidden_size)
        self._method = factory.method

    def __call__(self, token_ids: Tensor) -> Tensor:
        """As `Embedding`'s."""
        return self._weight.lookup(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [rows, hidden_size] -> [rows, vocab_size], in float32."""
        return self._weight.linear(hidden, None, torch.float32)

    def parameters(self, name: str) -> dict[str, Parameter]:
        """By the name that the embedding or the projection has in the checkpoint."""
        return self._method.head_parameters(self._weight, name)
