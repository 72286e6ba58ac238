"""The paged KV cache in plain torch, and writing to it.

key, value    [num_blocks, block_size, num_kv_heads, head_dim]      slot = block * block_size + offset in the block
scales        [num_blocks, block_size, num_kv_heads] float32, of an int8 cache
"""

import torch
from torch import Tensor

from penstock.kernels.kv_store.zeros import zeros


class ReferenceCache:
    """One layer's keys and values as plain tensors."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype = dtype
        slots = (num_blocks, block_size, num_heads)
        self.key, self.value = (zeros((*slots, head_dim), dtype, device) for _ in range(2))
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        if dtype == torch.int8:
            self.key_scales, self.value_scales = (zeros(slots, torch.float32, device) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, all at once: each pair is (from, to)."""
        sources, targets = torch.tensor(pairs, dtype=torch.int64).to(self.key.device).unbind(1)
        for tensor in self._tensors():
            copy_blocks(tensor, sources, targets)

    def _tensors(self) -> list[Tensor]:
        tensors = (self.key, self.value, self.key_scales, self.value_scales)
        return [tensor for tensor in tensors if tensor is not None]


def store_kv(key: Tensor, value: Tensor, cache: ReferenceCache, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to the slots `slot_mapping` [num_tokens], int64.

    They are converted to the cache's type. No slot may occur twice.
    """
    for rows, target, scales in ((key, cache.key, cache.key_scales), (value, cache.value, cache.value_scales)):
        if scales is None:
            target.flatten(0, 1).index_copy_(0, slot_mapping, rows.to(target.dtype))
        else:
            integers, steps = to_int8(rows.float())
            target.flatten(0, 1).index_copy_(0, slot_mapping, integers)
            scales.flatten(0, 1).index_copy_(0, slot_mapping, steps)


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [..., head_dim] as integers from -127 to 127, and the scale [...] of each row.

    A row with an element that is no number, or infinite, gets a scale that is no number.
    """
    largest = rows.abs().amax(-1)
    usable = (largest >= 1e-30) & (largest <= 3e38)
    factor = torch.where(usable, 127.0 / largest, 0.0)
    integers = (rows * factor.unsqueeze(-1)).nan_to_num_().round_().to(torch.int8)
    poison = (rows * 0.0).sum(-1)
    return integers, torch.where(usable, largest / 127.0, 0.0) + poison


def copy_blocks(tensor: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the blocks `sources` of `tensor` to the blocks `targets` [num_copies], int64, all at once."""
    tensor.index_copy_(0, targets, tensor.index_select(0, sources))
