"""The largest magnitude of floating-point values by their bits, which order magnitudes as integers do, NaN last.

Integer instructions look at all values at memory bandwidth, also of the types of 16 bits that numpy computes slowly.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

INFINITY = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits of infinity, by type; those of NaN are larger, those of numbers smaller."""
_CHUNK_BYTES = 2**18
"""Bytes looked at at a time: they stay in the core's cache."""


def largest_magnitude(values: "NDArray[Any]") -> int:
    """The bits of the value that is largest without its sign; 0 of no values. `values`: of 16 or 32 bits."""
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    step = _CHUNK_BYTES // bits.itemsize
    shifted, largest = np.empty(min(step, len(bits)), bits.dtype), 0
    for first in range(0, len(bits), step):
        chunk = bits[first : first + step]
        np.left_shift(chunk, 1, out=shifted[: len(chunk)])  # without the sign
        largest = max(largest, int(shifted[: len(chunk)].max()))
    return largest >> 1


def is_finite(values: "NDArray[Any]") -> bool:
    """Whether no value is NaN or infinite; `values` of a type in `INFINITY`."""
    return largest_magnitude(values) < INFINITY[values.dtype.name]
