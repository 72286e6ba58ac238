"""Writing to the paged KV cache in plain torch.

cache  [num_blocks, block_size, num_kv_heads, head_dim]      slot = block * block_size + offset in the block
"""

from torch import Tensor


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to the slots `slot_mapping` [num_tokens], int64.

    They are converted to the cache's type. No slot may occur twice.
    """
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value.to(value_cache.dtype))


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the blocks `sources` of `cache` to the blocks `targets` [num_copies], int64, all at once."""
    cache.index_copy_(0, targets, cache.index_select(0, sources))
