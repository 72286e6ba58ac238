"""The largest magnitude of floating-point values by their bits, which order magnitudes as integers do, NaN last.

Integer instructions look at all values at memory bandwidth, also of the types of 16 bits that numpy computes slowly.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

INFINITY = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits of infinity, by type; those of NaN are larger, those of numbers smaller."""
_CHUNK_BYTES = 2**20
"""Bytes looked at at a time: they stay in the core's cache."""


def largest_magnitude(values: "NDArray[Any]") -> int:
    """The bits of the value that is largest without its sign; 0 of no values. `values`: of 16 or 32 bits."""
    size = values.dtype.itemsize
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{size}")
    step, sign, largest = _CHUNK_BYTES // size, 1 << (8 * size - 1), 0
    for first in range(0, len(bits), step):
        chunk = bits[first : first + step]
        largest = max(largest, int(chunk.view(f"i{size}").max()))  # of the positive values
        largest = max(largest, int(chunk.max()) - sign)  # of the negative ones
    return largest


def is_finite(values: "NDArray[Any]") -> bool:
    """Whether no value is NaN or infinite; `values` of a type in `INFINITY`."""
    return largest_magnitude(values) < INFINITY[values.dtype.name]
