"""The memory layout of recurrent states in a block of their pool. No torch: the memory plan uses it, too.

A matrix state, one matrix [rows, columns] per head, is stored in slices of 32 columns, [heads, slices, rows, 32], so
that a kernel's slice fits in the L1 cache. The last slice is padded with zeros.
"""

import math

SLICE = 32
"""Columns per slice of a matrix state; `kSlice` in csrc/state_walk.h."""
_ALIGNMENT = 16


def matrix_state(heads: int, rows: int, columns: int) -> tuple[int, ...]:
    """The shape of a part that holds a matrix [rows, columns] for each head."""
    return heads, -(-columns // SLICE), rows, SLICE


def part_elements(part: tuple[int, ...]) -> int:
    """Float32 elements that a part occupies, padded so that the next part begins a cache line."""
    return -(-math.prod(part) // _ALIGNMENT) * _ALIGNMENT
