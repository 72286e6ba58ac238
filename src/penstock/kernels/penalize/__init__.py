"""Penalties taken off the logits of tokens that a sequence has already."""

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock import native as library
from penstock.kernels.penalize import native, reference

__all__ = ["CountTable", "penalize"]


class CountTable(NamedTuple):
    """The distinct tokens of a history, ascending, with their counts; int32. One that counts 0 is as if not there."""

    tokens: "array[int]"
    totals: "array[int]"
    """How often each is in prompt and answer."""
    answers: "array[int]"
    """How often in the answer."""


def penalize(
    logits: Tensor, rows: NDArray[np.int64], penalties: NDArray[np.float64], tables: list[CountTable], *, undo: bool
) -> Callable[[], object] | None:
    """Change rows of `logits` [num_rows, vocab] float32 in place; what undoes it, where that is asked for.

    Args:
        rows: [n], which of them, each once.
        penalties: [n, 4]: `repetition` divides logits above 0 and multiplies others; then `frequency` is taken off for
            each time that the answer has the token, and `presence` once; then `share` for each time that prompt and
            answer have it.
        tables: whose tokens.
    """
    assert len(rows) == len(penalties) == len(tables)
    if logits.is_cpu and library.library() is not None:
        return native.penalize(logits, rows, penalties, tables, undo=undo)
    return reference.penalize(logits, rows, penalties, tables, undo=undo)
