"""Rows of logits without the tokens that a mask does not allow."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock import native as library
from penstock.kernels.mask import native, reference

__all__ = ["mask"]


def mask(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
    """Put to minus infinity, in place, what is not allowed.

    Args:
        logits: [num_rows, vocab] float32.
        rows: [num_masked], which of them, each once.
        bits: [num_masked, vocab / 32 rounded up]: a bit a token, the lowest first, set where it is allowed.
    """
    assert bits.shape == (len(rows), -(-logits.shape[-1] // 32)), "the mask is not as wide as the logits"
    if logits.is_cpu and library.library() is not None:
        native.mask(logits, rows, bits)
    else:
        reference.mask(logits, rows, bits)
