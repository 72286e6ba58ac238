"""Hidden states of the tokens in the KV cache, after the model's last norm: inputs of a multi-token prediction head.

| a row for each slot of the main cache group | a row of zeros | a row for each of the head's own outputs |
"""

from array import array
from collections.abc import Sequence
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.array_types import A
from penstock.kernels.ops import Ops
from penstock.native.array import dtype_of


class HiddenStates(Generic[A]):
    """They start as zeros, and are not stored to or loaded from files: only drafts depend on them."""

    def __init__(
        self,
        ops: Ops[A],
        num_blocks: int,
        block_size: int,
        num_own: int,
        size: int,
        dtype: str,
        device: str,
    ) -> None:
        """
        Args:
            num_own: maximum number of the head's own outputs, those of one step.
        """
        self._copy_rows, self._block_size = ops.copy_rows, block_size
        self._zeros = num_blocks * block_size
        shape = (self._zeros + 1 + num_own, size)
        memory = ops.allocator.zeros(shape[0] * size * dtype_of(dtype).itemsize)
        self.rows = ops.constant(memory.view(dtype_of(dtype)).reshape(shape), None, device)

    @property
    def nbytes(self) -> int:
        size: int = self.rows.nbytes
        return size

    def rows_of(self, slots: "array[int]") -> NDArray[np.int64]:
        """The row of each of these slots; that of zeros where a slot is negative."""
        rows = np.array(slots, np.int64)
        # A text's first token has no predecessor.
        rows[rows < 0] = self._zeros
        return rows

    def own_row(self, index: int) -> int:
        """The row of one of the head's own outputs."""
        return self._zeros + 1 + index

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the rows of blocks simultaneously: each pair is (from, to)."""
        if pairs:
            size = self._block_size
            self._copy_rows(self.rows[: self._zeros].view(-1, size * self.rows.shape[1]), pairs)
