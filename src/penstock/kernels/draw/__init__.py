"""A token for each row of logits: the likeliest, or a draw from what the row's controls leave.

The controls apply in this order, each as `transformers` defines it:

    temperature   divides the logits; 0: the first of the likeliest, whatever the other controls say
    top_k         keeps the k likeliest tokens, and all that are as likely as the k-th
    top_p         keeps the likeliest that reach this probability; of equally likely ones, those of lower id
    min_p         drops what is less likely than this share of the likeliest
    typical_p     keeps what is nearest to the mean information until it reaches this probability

A draw cumulates the probabilities by ascending token id, and takes the token that its random number falls on.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock import native as library
from penstock.kernels.draw import native, reference

__all__ = ["Controls", "draw"]


class Controls(NamedTuple):
    """What to leave of each row, and where in it to draw: [num_rows] each."""

    temperature: NDArray[np.float64]
    """0, or from 1e-30 on."""
    top_k: NDArray[np.float64]
    """0: all."""
    top_p: NDArray[np.float64]
    """1: all."""
    min_p: NDArray[np.float64]
    """0: all."""
    typical_p: NDArray[np.float64]
    """1: all."""
    uniform: NDArray[np.float64]
    """Random numbers in [0, 1)."""


def draw(logits: Tensor, controls: Controls) -> Tensor:
    """`logits` [rows, vocab] float32 -> [rows] int64 tokens.

    -1 where a logit is not a number or plus infinity, or all are minus infinity.
    """
    table = np.stack(controls, axis=1)
    if logits.is_cpu and library.library() is not None:
        return native.draw(logits, table)
    return reference.draw(logits, table)
