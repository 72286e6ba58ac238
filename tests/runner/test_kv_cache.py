from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.plan import BlockCopy
from penstock.kernels.attention import LayerCache
from penstock.kernels.attention.native import PackedCache
from penstock.kernels.attention.reference_cache import ReferenceCache
from penstock.kernels.tables import make_ops
from penstock.models.registry import read_spec
from penstock.native.array import NoNativeKernelError
from penstock.runner.forward import KVCache
from tests.kernels.versions import REFERENCE, needs_native
from tests.support.pages import backed_bytes
from tests.support.stepping import kept, settings_for, spying

OPS = make_ops("cpu")


@pytest.fixture
def cache(tiny_llama: Path) -> KVCache:
    checkpoint, settings = settings_for(tiny_llama)
    return KVCache.of_model(read_spec(checkpoint), settings, OPS)


def test_it_has_the_planned_size(cache: KVCache, tiny_llama: Path) -> None:
    _, settings = settings_for(tiny_llama)
    assert sum(layer.nbytes for layer in kept(cache)) == settings.memory.kv_cache


def test_it_has_the_asked_type(tiny_llama: Path) -> None:
    checkpoint, settings = settings_for(tiny_llama, kv_cache_dtype="bfloat16")
    assert kept(KVCache.of_model(read_spec(checkpoint), settings, OPS))[0].dtype == OPS.dtype("bfloat16")


def test_an_int8_cache_has_the_planned_size_too(tiny_llama: Path) -> None:
    checkpoint, settings = settings_for(tiny_llama, kv_cache_dtype="int8")
    cache = KVCache.of_model(read_spec(checkpoint), settings, OPS)
    assert sum(layer.nbytes for layer in kept(cache)) == settings.memory.kv_cache


@pytest.mark.parametrize("block_size", [4, 5], ids=["any layout", "the reference's layout"])
def test_blocks_are_copied_in_all_layers(tiny_llama: Path, block_size: int) -> None:
    checkpoint, settings = settings_for(tiny_llama, kv_cache_dtype="int8", block_size=block_size)
    cache = KVCache.of_model(read_spec(checkpoint), settings, OPS if block_size == 4 else REFERENCE)
    for number, layer in enumerate(kept(cache)):
        for part in parts_of(layer):
            part[3], part[4] = number + 1, number + 9
    cache.copy([BlockCopy(0, 3, 7), BlockCopy(0, 4, 3)])
    for number, layer in enumerate(kept(cache)):
        for part in parts_of(layer):
            assert (part[7] == number + 1).all()
            assert (part[3] == number + 9).all()
            assert not part[2].any()


def parts_of(layer: LayerCache) -> list[Any]:
    """Arrays whose first axis is the blocks."""
    if isinstance(layer, PackedCache):
        return [layer.blocks]
    assert isinstance(layer, ReferenceCache)
    return [layer.key, layer.value, layer.key_scales, layer.value_scales]


@needs_native
def test_an_odd_block_size_has_no_native_kernel(tiny_llama: Path) -> None:
    checkpoint, settings = settings_for(tiny_llama, block_size=5)
    with pytest.raises(NoNativeKernelError, match="blocks of 5 tokens"):
        KVCache.of_model(read_spec(checkpoint), settings, OPS)


@pytest.mark.parametrize("block_size", [4, 5], ids=["any layout", "the reference's layout"])
def test_on_a_cpu_it_takes_memory_only_as_it_is_used(tiny_llama: Path, block_size: int) -> None:
    checkpoint, settings = settings_for(tiny_llama, kv_cache_memory="512MiB", block_size=block_size)
    asked: list[int] = []
    cache = KVCache.of_model(read_spec(checkpoint), settings, spying(OPS if block_size == 4 else REFERENCE, asked))
    assert not asked
    assert resident(cache) == 0
    assert not parts_of(kept(cache)[0])[0][4].any()


@needs_native
def test_memory_is_ready_before_the_kernels_write_and_keeps_its_content(tiny_llama: Path) -> None:
    checkpoint, settings = settings_for(tiny_llama, kv_cache_memory="512MiB")
    cache = KVCache.of_model(read_spec(checkpoint), settings, OPS)
    for layer in kept(cache):
        parts_of(layer)[0][2] = 7
    before = resident(cache)
    cache.back([settings.memory.num_blocks // 2])
    assert resident(cache) - before > 200 * 2**20
    cache.back([3])  # no less than before
    assert all((parts_of(layer)[0][2] == 7).all() for layer in kept(cache))


def resident(cache: KVCache) -> int:
    """Bytes of the cache's own memory that the system has backed."""
    wholes = {
        array.ctypes.data: array
        for layer in kept(cache)
        for part in parts_of(layer)
        if part is not None
        for array in [whole(part)]
    }
    return sum(map(backed_bytes, wholes.values()))


def whole(part: Any) -> np.ndarray:
    """The array that a part is a view of."""
    array = part.view(torch.uint8).numpy() if isinstance(part, torch.Tensor) else part
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
