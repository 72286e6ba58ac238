"""How the states of recurrent layers lie in a block of their pool. No torch: the memory plan goes by it, too.

A matrix state, one matrix [rows, columns] a head, lies in slices of 32 columns, so that a kernel walks a slice that
stays in its first cache: [heads, slices, rows, 32], what is beyond the last column zeros.
"""

import math

SLICE = 32
"""Columns of a slice of a matrix state; `kSlice` of csrc/state_walk.h."""
_ALIGNMENT = 16


def matrix_state(heads: int, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of a part that holds a matrix [rows, columns] for each head."""
    return heads, -(-columns // SLICE), rows, SLICE


def part_elements(part: tuple[int, ...]) -> int:
    """Elements of float32 that a part takes: the next one begins a cache line."""
    return -(-math.prod(part) // _ALIGNMENT) * _ALIGNMENT
