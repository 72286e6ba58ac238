"""Sampling: tokens from logits, top-k log-probabilities, grammar bitmasks and penalties.

A row's controls apply in this order, each as `transformers` defines it:

    temperature   divides the logits; 0: greedy, the lowest id among the most likely; ignores the other controls
    top_k         keeps the k most likely tokens, and all tokens as likely as the k-th
    top_p         keeps the most likely tokens until they reach this probability; ties go to the lower id
    min_p         drops tokens less likely than this fraction of the most likely token's probability
    typical_p     keeps the tokens nearest to the mean information until they reach this probability

A token is drawn by inversion: probabilities are accumulated by ascending token id until they exceed the random number.
"""

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SCALE = 2.0**40
"""The weight of a row's most likely token; the sum of 2**22 of them fits in int64. Tokens below 2**-40 of it have
weight 0."""


class Controls(NamedTuple):
    """The sampling parameters of each row, and its random number: [num_rows] each."""

    temperature: NDArray[np.float64]
    """0, or at least 1e-30."""
    top_k: NDArray[np.float64]
    """0: off."""
    top_p: NDArray[np.float64]
    """1: off."""
    min_p: NDArray[np.float64]
    """0: off."""
    typical_p: NDArray[np.float64]
    """1: off."""
    uniform: NDArray[np.float64]
    """Random numbers in [0, 1)."""


class TopkLogprobs(NamedTuple):
    """The k most likely tokens of each row, and what their log-probabilities are computed from."""

    top: NDArray[np.float32]
    """[rows]: the largest logit; not finite if the row cannot be sampled from."""
    total: NDArray[np.int64]
    """[rows]: the sum of the tokens' weights at temperature 1; see `token_weights`."""
    logits: NDArray[np.float32]
    """[rows, k]: the largest logits in descending order, ties by ascending id."""
    token_ids: NDArray[np.int64]
    """[rows, k]: their tokens."""


class CountTable(NamedTuple):
    """The distinct tokens of a sequence in ascending order, with their counts, int32. Count 0 means absent."""

    tokens: "array[int]"
    totals: "array[int]"
    """Occurrences in prompt and answer."""
    answers: "array[int]"
    """Occurrences in the answer."""
