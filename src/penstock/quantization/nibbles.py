"""Unpacks 4-bit integers from checkpoints: eight per int32, the first one in the lowest bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

PER_WORD = 8
Bytes = NDArray[np.uint8]
_CHUNK = 2**16
"""Bytes unpacked at a time: intermediate results stay in the core's cache."""
_STRIP = 64
"""Columns transposed at a time: they stay in the core's cache until all of their elements are read."""


def nibble_pairs(packed: Bytes) -> Bytes:
    """`packed` [..., n] -> [..., 2 * n]: the lower nibble of each byte, then its upper one."""
    wide = packed.astype(np.uint16)  # little-endian
    flat = wide.reshape(-1)
    for first in range(0, len(flat), _CHUNK):
        chunk = flat[first : first + _CHUNK]
        chunk |= chunk << 4
        chunk &= 0x0F0F
    return wide.view(np.uint8)


def unpack_columns(words: NDArray[Any]) -> Bytes:
    """`words` [rows, columns / 8] int32 -> [rows, columns]."""
    return nibble_pairs(np.ascontiguousarray(words).view(np.uint8))


def unpack_words(words: NDArray[Any]) -> Bytes:
    """`words` [..., n] int32 -> [..., n, 8], 0 to 15."""
    return unpack_columns(words).reshape(*words.shape, PER_WORD)


def unpack_rows(words: NDArray[Any]) -> Bytes:
    """`words` [rows / 8, columns] int32 -> [columns, rows]: unpacked and transposed."""
    octets = unpack_columns(words).view(np.uint64)  # [rows / 8, columns], eight nibbles each
    return transposed(octets).view(np.uint8)


def transposed(matrix: NDArray[Any]) -> NDArray[Any]:
    """The transpose of `matrix` [rows, columns], contiguous."""
    made = np.empty(matrix.shape[::-1], matrix.dtype)
    for first in range(0, len(made), _STRIP):
        made[first : first + _STRIP] = matrix[:, first : first + _STRIP].T
    return made
