"""The likeliest token of each row of logits."""

from torch import Tensor

from penstock import native as library
from penstock.kernels.argmax import native, reference

__all__ = ["argmax"]


def argmax(logits: Tensor) -> Tensor:
    """`logits` [rows, vocab] float32 -> [rows] int64: the first of the largest.

    -1 where one is not a number or plus infinity, or all are minus infinity.
    """
    if logits.is_cpu and library.library() is not None:
        return native.argmax(logits)
    return reference.argmax(logits)
