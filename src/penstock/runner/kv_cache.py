"""The KV cache's memory: allocated once, from the memory plan."""

import time
from collections.abc import Sequence
from typing import TypeVar

import torch

from penstock.config import Settings
from penstock.core.plan import BlockCopy
from penstock.kernels.attention import CacheShape, LayerCache, LayerCaches
from penstock.kernels.ops import Ops
from penstock.memory import BYTES_OF
from penstock.models.decoder_config import DecoderConfig
from penstock.reserve import FIRST_TOKENS

_BACKING_SECONDS = 0.5
"""What starting may take longer, so that the first steps need not wait for memory."""
_BLOCKS_AT_ONCE = 16
_CPU_GATHER_BYTES = 2 * 2**20
"""Of keys gathered at one time: few enough to be in a core's cache still when they are read."""

T = TypeVar("T")


class KVCache:
    """Keys and values of every layer, paged; layers of a cache group share block tables and a pool."""

    def __init__(self, config: DecoderConfig, settings: Settings, ops: Ops) -> None:
        self.block_size = settings.memory.block_size
        self.groups = settings.memory.groups
        self._caches = [
            _new_caches(config, settings, ops, len(group.layers), group.num_blocks) for group in self.groups
        ]
        self._places = sorted(  # of the layers: (layer, group, place in the group)
            (layer, group, place) for group, one in enumerate(self.groups) for place, layer in enumerate(one.layers)
        )
        self.layers: list[LayerCache] = [self._caches[group].layers[place] for _, group, place in self._places]
        self._back_first_blocks(settings)

    def by_layer(self, of_groups: Sequence[T]) -> list[T]:
        """What belongs to each layer's group."""
        return [of_groups[group] for _, group, _ in self._places]

    def _back_first_blocks(self, settings: Settings) -> None:
        """What four full steps fill; then, until time is up, what the first tokens do."""
        backed = 4 * settings.max_num_batched_tokens // self.block_size
        last = FIRST_TOKENS // self.block_size
        deadline = time.monotonic() + _BACKING_SECONDS
        self.back([backed] * len(self.groups))
        while backed < last and time.monotonic() < deadline:
            backed = min(backed + _BLOCKS_AT_ONCE, last)
            self.back([backed] * len(self.groups))

    def back(self, num_blocks: Sequence[int]) -> None:
        """Have memory ready for so many of the first blocks of each group, before the kernels write to them."""
        for group, caches, count in zip(self.groups, self._caches, num_blocks, strict=True):
            caches.back(min(count, group.num_blocks))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, in all layers of their groups."""
        for group, caches in enumerate(self._caches):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            for layer in caches.layers if pairs else ():
                layer.copy_blocks(pairs)


def _new_caches(config: DecoderConfig, settings: Settings, ops: Ops, num_layers: int, num_blocks: int) -> LayerCaches:
    shape = CacheShape(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=settings.memory.block_size,
        num_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=getattr(torch, settings.kv_cache_dtype),
        device=torch.device(settings.device),
        gather_limit=_gather_limit(config, settings),
    )
    return ops.new_caches(shape)


def _gather_limit(config: DecoderConfig, settings: Settings) -> int:
    """Keys that attention may gather at one time: what the memory plan reckons with, or less where that is faster."""
    planned = 2 * settings.max_model_len
    if settings.device != "cpu":
        return planned
    is_int8 = settings.kv_cache_dtype == "int8"
    head_bytes = config.head_dim + 4 if is_int8 else config.head_dim * BYTES_OF[settings.kv_cache_dtype]
    return min(planned, _CPU_GATHER_BYTES // (config.num_kv_heads * head_bytes))
