"""The likeliest token in plain torch."""

from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """See `penstock.kernels.argmax`."""
    top, tokens = logits.max(-1)  # the first of equal ones; a NaN counts as the largest
    return tokens.where(top.isfinite(), -1)
