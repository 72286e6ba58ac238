"""The KV cache's memory: allocated once, from the memory plan."""

import time

import torch

from penstock.config import Settings
from penstock.kernels.attention import CacheShape
from penstock.kernels.ops import Ops
from penstock.models.decoder_config import DecoderConfig
from penstock.reserve import FIRST_TOKENS

_BACKING_SECONDS = 0.5
"""What starting may take longer, so that the first steps need not wait for memory."""
_BLOCKS_AT_ONCE = 16
_CPU_GATHER_BYTES = 2 * 2**20
"""Of keys gathered at one time: few enough to be in a core's cache still when they are read."""


class KVCache:
    """Keys and values of every layer, paged."""

    def __init__(self, config: DecoderConfig, settings: Settings, ops: Ops) -> None:
        self.block_size = settings.memory.block_size
        shape = CacheShape(
            num_layers=config.num_layers,
            num_blocks=settings.memory.num_blocks,
            block_size=self.block_size,
            num_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=getattr(torch, settings.kv_cache_dtype),
            device=torch.device(settings.device),
            gather_limit=_gather_limit(config, settings),
        )
        caches = ops.new_caches(shape)
        self.layers, self._back_blocks = caches.layers, caches.back
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
        self._back_blocks(num_blocks)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, in all layers: each pair is (from, to)."""
        for layer in self.layers:
            layer.copy_blocks(pairs)


def _gather_limit(config: DecoderConfig, settings: Settings) -> int:
    """Keys that attention may gather at one time: what the memory plan reckons with, or less where that is faster."""
    planned = 2 * settings.max_model_len
    if settings.device != "cpu":
        return planned
    token_bytes = settings.memory.kv_cache // (2 * config.num_layers * settings.memory.num_tokens)
    return min(planned, _CPU_GATHER_BYTES // token_bytes)
