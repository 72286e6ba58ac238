"""The layout of a step by one native call, `csrc/penstock.cpp`.

Each of numpy's many would miss the processor's caches, through which all weights pass in every step.
"""

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np

from penstock.kernels.batch import IntArray
from penstock.native import Library


class BatchKernels:
    """Lays steps out by the library."""

    def __init__(self, library: Library) -> None:
        self._lay_out = library.function("penstock_lay_out", "pspllp", ctypes.c_int64)

    def lay_out(
        self,
        query_lens: Sequence[int],
        starts: Sequence[int],
        block_tables: Sequence["array[int]"],
        token_ids: "array[int]",
        block_size: int,
    ) -> tuple[IntArray, int]:
        """See `LayOut` in `penstock.kernels.batch`."""
        num_seqs, num_tokens = len(block_tables), len(token_ids)
        assert sum(query_lens) == num_tokens
        numbers = array("q", [*query_lens, *starts, *map(len, block_tables)])
        tables = b"".join(block_tables)
        memory = np.empty(3 * num_seqs + 2 + len(tables) // 4 + 3 * num_tokens, np.int32)
        num_blocks = self._lay_out(
            numbers.buffer_info()[0],
            tables,
            token_ids.buffer_info()[0],
            num_seqs,
            block_size,
            memory.__array_interface__["data"][0],  # `ctypes.data` is slower
        )
        assert num_blocks > 0, "a block table ends before its sequence"
        return memory, num_blocks
