"""What the log-probabilities of a row's tokens are made of: its likeliest tokens, and the weight of all."""

from typing import NamedTuple

from torch import Tensor

from penstock import native as library
from penstock.kernels.leading import native, reference

__all__ = ["Leading", "leading"]


class Leading(NamedTuple):
    top: Tensor
    """[rows] float32: the largest logit; not finite where the row is none to sample from."""
    total: Tensor
    """[rows] int64: the sum of the tokens' weights, as `kernels.draw` weighs them at temperature 1."""
    logits: Tensor
    """[rows, k] float32: the largest, descending, equal ones by ascending id."""
    token_ids: Tensor
    """[rows, k] int64: their tokens."""


def leading(logits: Tensor, k: int) -> Leading:
    """The `k` likeliest tokens, at most the vocabulary, of each row of `logits` [rows, vocab] float32."""
    if logits.is_cpu and library.library() is not None:
        return Leading(*native.leading(logits, k))
    return Leading(*reference.leading(logits, k))
