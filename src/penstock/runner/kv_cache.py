"""The KV cache's memory: allocated once, from the memory plan."""

import torch

from penstock.config import Settings
from penstock.kernels.kv_store import Backing, PackedCache, can_pack, new_caches
from penstock.models.decoder_config import DecoderConfig


class KVCache:
    """Keys and values of every layer, paged; `packed` says whether in the native layout."""

    def __init__(self, config: DecoderConfig, settings: Settings) -> None:
        self.block_size = settings.memory.block_size
        device = torch.device(settings.device)
        self.packed = can_pack(self.block_size, config.head_dim, getattr(torch, settings.dtype), device)
        self.layers = new_caches(
            config.num_layers,
            settings.memory.num_blocks,
            self.block_size,
            config.num_kv_heads,
            config.head_dim,
            getattr(torch, settings.kv_cache_dtype),
            device,
            packed=self.packed,
        )
        first = self.layers[0]
        self._backing = Backing(first) if isinstance(first, PackedCache) else None
        first_steps = 4 * settings.max_num_batched_tokens // self.block_size
        self.back(min(settings.memory.num_blocks, first_steps))

    def back(self, num_blocks: int) -> None:
        """Have memory ready for the first `num_blocks` blocks, before the kernels write to them."""
        if self._backing is not None:
            self._backing.extend(num_blocks)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, in all layers: each pair is (from, to)."""
        for layer in self.layers:
            layer.copy_blocks(pairs)
