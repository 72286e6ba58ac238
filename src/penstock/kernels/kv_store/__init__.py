"""One layer's share of the paged KV cache. `reference.py` has it as plain tensors, `packed.py` in the native layout."""

import torch

from penstock import native
from penstock.kernels.kv_store.packed import Backing, PackedCache, packed_caches
from penstock.kernels.kv_store.reference import ReferenceCache, copy_blocks, store_kv, to_int8

LayerCache = ReferenceCache | PackedCache

__all__ = [
    "Backing",
    "LayerCache",
    "PackedCache",
    "ReferenceCache",
    "can_pack",
    "copy_blocks",
    "new_caches",
    "packed_caches",
    "store_kv",
    "to_int8",
]


def can_pack(block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native kernels serve a model of `dtype` with such a cache on this machine."""
    fits = block_size % 2 == 0 and head_dim % 4 == 0 and head_dim <= PackedCache.MAX_HEAD_DIM
    return fits and device.type == "cpu" and native.supports(dtype) and native.library() is not None


def new_caches(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    packed: bool,
) -> tuple[LayerCache, ...]:
    """The layers' caches, of zeros, for `num_heads` key heads; `dtype` may be int8, with scales of each token and head.

    They start as zeros: a padded gather may touch a slot that was never written, whose weight is 0 but whose content
    must then be a number, as 0 times not-a-number is not a number.
    """
    if packed:
        return packed_caches(num_layers, num_blocks, block_size, num_heads, head_dim, dtype)
    return tuple(ReferenceCache(num_blocks, block_size, num_heads, head_dim, dtype, device) for _ in range(num_layers))
