"""The KV cache's memory: allocated once, from the memory plan."""

import math

import numpy as np
import torch

from penstock.config import Settings
from penstock.kernels.kv_store import copy_blocks
from penstock.layers.attention import LayerCache
from penstock.models.decoder_config import DecoderConfig


class KVCache:
    """Keys and values of every layer, paged.

    layers[i].key, layers[i].value    [num_blocks, block_size, num_kv_heads, head_dim]

    It starts as zeros: a padded gather may touch a slot that was never written, whose weight is 0 but whose content
    must then be a number, as 0 times not-a-number is not a number.
    """

    def __init__(self, config: DecoderConfig, settings: Settings) -> None:
        self.block_size = settings.memory.block_size
        self._device = torch.device(settings.device)
        shape = (settings.memory.num_blocks, self.block_size, config.num_kv_heads, config.head_dim)
        dtype: torch.dtype = getattr(torch, settings.kv_cache_dtype)
        self.layers = tuple(
            LayerCache(_zeros(shape, dtype, self._device), _zeros(shape, dtype, self._device))
            for _ in range(config.num_layers)
        )

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, in all layers: each pair is (from, to)."""
        sources, targets = torch.tensor(pairs, dtype=torch.int64).to(self._device).unbind(1)
        for layer in self.layers:
            copy_blocks(layer.key, sources, targets)
            copy_blocks(layer.value, sources, targets)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, memory that the system zeroes when it is first touched: reserved now, and no time spent on it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
