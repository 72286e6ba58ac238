"""The KV cache's memory: allocated once, from the memory plan."""

import time

import torch

from penstock.config import Settings
from penstock.kernels.kv_store import Backing, PackedCache, can_pack, new_caches
from penstock.models.decoder_config import DecoderConfig
from penstock.reserve import FIRST_TOKENS

_BACKING_SECONDS = 0.5
"""What starting may take longer, so that the first steps need not wait for memory."""
_BLOCKS_AT_ONCE = 16


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
        self._back_first_blocks(settings)

    def _back_first_blocks(self, settings: Settings) -> None:
        """What four full steps fill; then, until time is up, what the first tokens do."""
        backed = min(settings.memory.num_blocks, 4 * settings.max_num_batched_tokens // self.block_size)
        last = min(settings.memory.num_blocks, FIRST_TOKENS // self.block_size)
        deadline = time.monotonic() + _BACKING_SECONDS
        self.back(backed)
        while backed < last and time.monotonic() < deadline:
            backed = min(backed + _BLOCKS_AT_ONCE, last)
            self.back(backed)

    def back(self, num_blocks: int) -> None:
        """Have memory ready for the first `num_blocks` blocks, before the kernels write to them."""
        if self._backing is not None:
            self._backing.extend(num_blocks)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, in all layers: each pair is (from, to)."""
        for layer in self.layers:
            layer.copy_blocks(pairs)
