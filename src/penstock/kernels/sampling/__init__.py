"""From logits to tokens: a token for each row, the most likely ones for log-probabilities, and masks.

A row's controls apply in this order, each as `transformers` defines it:

    temperature   divides the logits; 0: the first of the most likely, whatever the other controls say
    top_k         keeps the k most likely tokens, and all that are as likely as the k-th
    top_p         keeps the most likely that reach this probability; of equally likely ones, those of lower id
    min_p         drops what is less likely than this share of the most likely
    typical_p     keeps what is nearest to the mean information until it reaches this probability

A draw cumulates the probabilities by ascending token id, and takes the token that its random number falls on.
"""

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SCALE = 2.0**40
"""The weight of a row's most likely token; 2**22 of them add up in int64. Below 2**-40 of it, a token has no weight."""


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


class TopkLogprobs(NamedTuple):
    """What the log-probabilities of each row are made of."""

    top: Tensor
    """[rows] float32: the largest logit; not finite where the row is none to sample from."""
    total: Tensor
    """[rows] int64: the sum of the tokens' weights, as `sample` weighs them at temperature 1."""
    logits: Tensor
    """[rows, k] float32: the largest, descending, equal ones by ascending id."""
    token_ids: Tensor
    """[rows, k] int64: their tokens."""


class CountTable(NamedTuple):
    """The distinct tokens of a history, ascending, with their counts, int32. A token of count 0 counts as absent."""

    tokens: "array[int]"
    totals: "array[int]"
    """Occurrences in prompt and answer."""
    answers: "array[int]"
    """Occurrences in the answer."""
