"""The KV cache's memory: allocated once, from the memory plan."""

import torch

from penstock.config import Settings
from penstock.kernels.kv_store import can_pack, new_cache
from penstock.models.decoder_config import DecoderConfig


class KVCache:
    """Keys and values of every layer, paged; `packed` says whether in the native layout."""

    def __init__(self, config: DecoderConfig, settings: Settings) -> None:
        self.block_size = settings.memory.block_size
        device = torch.device(settings.device)
        self.packed = can_pack(self.block_size, config.head_dim, getattr(torch, settings.dtype), device)
        self.layers = tuple(
            new_cache(
                settings.memory.num_blocks,
                self.block_size,
                config.num_kv_heads,
                config.head_dim,
                getattr(torch, settings.kv_cache_dtype),
                device,
                packed=self.packed,
            )
            for _ in range(config.num_layers)
        )

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, in all layers: each pair is (from, to)."""
        for layer in self.layers:
            layer.copy_blocks(pairs)
