"""Hidden states of the tokens in the KV cache, after the model's last norm: inputs of a multi-token prediction head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.system.allocator import Allocator


class HiddenStates:
    """Stored by the blocks of the main cache group: a block's rows belong to its tokens.

    They start as zeros, and are not stored to or loaded from files: only drafts depend on them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        allocator: Allocator,
    ) -> None:
        shape = (num_blocks * block_size, size)
        if device.type == "cpu":
            memory = torch.from_numpy(allocator.zeros(shape[0] * size * dtype.itemsize))
            self._rows = memory.view(dtype).view(shape)
        else:
            self._rows = torch.zeros(shape, dtype=dtype, device=device)
        self._block_size = block_size

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def store(self, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` [count, size] in `slots` [count] int64."""
        self._rows.index_copy_(0, slots, rows)

    def load(self, slots: Tensor) -> Tensor:
        """Rows of `slots` [count] int64, zeros where a slot is negative: [count, size]."""
        rows = self._rows.index_select(0, slots.clamp(min=0))
        return rows.masked_fill_((slots < 0).unsqueeze(1), 0.0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks simultaneously: each pair is (from, to)."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self._rows.device).unbind(1)
            blocks = self._rows.view(-1, self._block_size * self._rows.shape[1])
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))
