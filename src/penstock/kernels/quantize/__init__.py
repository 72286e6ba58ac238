"""Weights to integers: `reference.py` is the truth; `native.py` is the same in C++, for the CPU."""

from typing import TypeVar

from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.quantize import native, reference
from penstock.kernels.quantize.reference import Int4, Int6, Int8

__all__ = ["Int4", "Int6", "Int8", "quantize_int4", "quantize_int6", "quantize_int8"]

Made = TypeVar("Made", Int8, Int6, Int4)

REFUSED = "cannot be quantized: it has weights that are infinite, not numbers or far too large"


def quantize_int8(weight: Tensor) -> Int8:
    """Round `weight` [out, in] to 8 bits, symmetric, with a scale a row.

    Raises:
        CheckpointError: a weight is not finite, or too large to be one.
    """
    return _checked(native.quantize_int8(weight) if native.takes(weight) else reference.quantize_int8(weight))


def quantize_int6(weight: Tensor) -> Int6:
    """Round `weight` [out, in] to 6 bits, symmetric, with a scale for each group of 128 columns.

    Raises:
        CheckpointError: as `quantize_int8`.
    """
    return _checked(native.quantize_int6(weight) if native.takes(weight) else reference.quantize_int6(weight))


def quantize_int4(weight: Tensor) -> Int4:
    """Round `weight` [out, in] to 4 bits, with a scale and a zero for each group of 128 columns.

    Raises:
        CheckpointError: as `quantize_int8`.
    """
    return _checked(native.quantize_int4(weight) if native.takes(weight) else reference.quantize_int4(weight))


def _checked(made: Made | None) -> Made:
    if made is None:
        raise CheckpointError(REFUSED)
    return made
