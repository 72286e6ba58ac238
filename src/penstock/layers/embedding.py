"""Token embedding, and the output projection that may share its weight."""

import torch
from torch import Tensor

from penstock.kernels.linear import linear


class Embedding:
    """A row a token. weight [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [num_tokens] int64 -> [num_tokens, hidden_size]."""
        return self.weight.index_select(0, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [rows, hidden_size] -> [rows, vocab_size], in float32."""
        return linear(hidden, self.weight).float()
