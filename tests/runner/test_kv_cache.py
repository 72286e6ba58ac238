import os
from pathlib import Path

import pytest
import torch

from penstock.models.registry import read_config
from penstock.runner.kv_cache import KVCache
from tests.stepping import settings_for


@pytest.fixture
def cache(tiny_llama: Path) -> KVCache:
    checkpoint, settings = settings_for(tiny_llama)
    return KVCache(read_config(checkpoint), settings)


def test_it_has_the_planned_size(cache: KVCache, tiny_llama: Path) -> None:
    _, settings = settings_for(tiny_llama)
    assert sum(layer.nbytes for layer in cache.layers) == settings.memory.kv_cache


def test_it_has_the_asked_type(tiny_llama: Path) -> None:
    checkpoint, settings = settings_for(tiny_llama, kv_cache_dtype="bfloat16")
    assert KVCache(read_config(checkpoint), settings).layers[0].dtype == torch.bfloat16


def test_blocks_are_copied_in_all_layers(cache: KVCache) -> None:
    for number, layer in enumerate(cache.layers):
        layer.key[3] = number + 1
        layer.value[4] = -number - 1
    cache.copy([(3, 7), (4, 3)])
    for number, layer in enumerate(cache.layers):
        assert (layer.key[7] == number + 1).all()
        assert not layer.key[3].any()
        assert (layer.value[3] == -number - 1).all()
        assert not layer.value[7].any()


def test_on_a_cpu_it_takes_memory_only_as_it_is_used(tiny_llama: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    checkpoint, settings = settings_for(tiny_llama, kv_cache_memory="512MiB")
    before = resident()
    cache = KVCache(read_config(checkpoint), settings)
    assert resident() - before < 32 * 2**20
    cache.layers[0].key[5] = 1.0
    assert not cache.layers[0].key[4].any()
