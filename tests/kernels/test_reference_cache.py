import math

import pytest
import torch

from penstock.kernels.attention import CacheShape
from penstock.kernels.attention.reference import hadamard, hadamard_size
from penstock.kernels.attention.reference_cache import ReferenceCache, apply_rotary, copy_blocks, store_kv
from penstock.system.allocator import Allocator

CPU = torch.device("cpu")


def reference_cache(
    num_blocks: int, block_size: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> ReferenceCache:
    return ReferenceCache(
        CacheShape(num_blocks, block_size, num_heads, head_dim, dtype, CPU, gather_limit=64), Allocator()
    )


def test_each_token_goes_to_its_slot_and_nothing_else_changes() -> None:
    cache = reference_cache(5, 4, 2, 3)
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    slots = [6, 0, 19]
    store_kv(key, value, cache, torch.tensor(slots))
    for content, stored in ((key, cache.key), (value, cache.value)):
        for row, slot in enumerate(slots):
            assert torch.equal(stored[slot // 4, slot % 4], content[row])
            stored[slot // 4, slot % 4] = 0
        assert not stored.any()


def test_keys_are_converted_to_the_type_of_the_cache() -> None:
    cache = reference_cache(1, 2, 1, 4, dtype=torch.bfloat16)
    key = torch.randn(1, 1, 4)
    store_kv(key, key, cache, torch.tensor([1]))
    assert torch.equal(cache.key[0, 1], key[0].bfloat16())


def test_an_int8_cache_holds_the_transform_of_each_head_of_a_token_to_a_127th_of_its_largest() -> None:
    cache = reference_cache(2, 2, 2, 6, dtype=torch.int8)
    key, value = torch.randn(1, 2, 6), torch.randn(1, 2, 6) * 1e-3
    store_kv(key, value, cache, torch.tensor([3]))
    for content, stored, scales in ((key, cache.key, cache.key_scales), (value, cache.value, cache.value_scales)):
        assert scales is not None
        transformed = hadamard(content[0])
        largest = transformed.abs().amax(-1, keepdim=True)
        held = stored[1, 1] * scales[1, 1].unsqueeze(-1)  # the transform of this is the content
        assert ((2 * held - transformed).abs() <= largest / 127 * 0.501).all()
        assert ((hadamard(held) - content[0]).abs() <= largest / 127 * 0.501).all()


def test_an_outlier_costs_the_other_elements_of_an_int8_cache_little() -> None:
    cache = reference_cache(2, 2, 1, 128, dtype=torch.int8)
    key = torch.randn(1, 1, 128)
    key[..., 5] = 60.0
    store_kv(key, key, cache, torch.tensor([3]))
    assert cache.key_scales is not None
    error = hadamard(cache.key[1, 1] * cache.key_scales[1, 1].unsqueeze(-1)) - key[0]
    assert error.square().mean().sqrt() < 0.25 * 60 / 127 / 12**0.5  # a quarter of rounding to 127ths of the outlier


@pytest.mark.parametrize("head_dim", [3, 6, 64, 80])
def test_the_transform_is_its_own_inverse_up_to_its_size(head_dim: int) -> None:
    rows = torch.randn(2, 5, head_dim)
    torch.testing.assert_close(hadamard(hadamard(rows)) / hadamard_size(head_dim), rows)
    scores = hadamard(rows) @ hadamard(rows).mT / hadamard_size(head_dim)
    torch.testing.assert_close(scores, rows @ rows.mT, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_int8_cache_does_not_hide_what_is_no_number(bad: float) -> None:
    cache = reference_cache(1, 2, 1, 4, dtype=torch.int8)
    key = torch.tensor([[[1.0, bad, 2.0, 3.0]]])
    store_kv(key, key, cache, torch.tensor([1]))
    assert cache.key_scales is not None
    assert cache.key_scales[0, 1].isnan().all()


def test_keys_and_values_may_be_views_into_a_fused_projection() -> None:
    fused = torch.randn(2, 6, 3)
    cache = reference_cache(2, 2, 2, 3)
    store_kv(fused[:, 2:4], fused[:, 4:], cache, torch.tensor([3, 0]))
    assert torch.equal(cache.key[1, 1], fused[0, 2:4])
    assert torch.equal(cache.value[0, 0], fused[1, 4:])


def test_copied_blocks_equal_their_sources_as_they_were_before() -> None:
    cache = torch.randn(4, 2, 1, 3)
    before = cache.clone()
    copy_blocks(cache, torch.tensor([0, 1, 0]), torch.tensor([2, 0, 3]))
    assert torch.equal(cache, before[[1, 1, 0, 0]])


@pytest.mark.parametrize(("head_dim", "angles"), [(2, 1), (8, 4), (10, 3)])
def test_rotary_turns_each_pair_by_its_angle(head_dim: int, angles: int) -> None:
    x, phases = torch.randn(3, 2, head_dim), torch.randn(3, angles)
    wanted = x.clone()
    for token in range(3):
        for head in range(2):
            for pair in range(angles):
                turned = complex(x[token, head, pair], x[token, head, pair + angles]) * complex(
                    math.cos(phases[token, pair]), math.sin(phases[token, pair])
                )
                wanted[token, head, pair], wanted[token, head, pair + angles] = turned.real, turned.imag
    apply_rotary(x, phases.cos(), phases.sin())
    torch.testing.assert_close(x, wanted, atol=1e-6, rtol=1e-5)


def test_rotary_works_in_place_on_some_heads_of_a_fused_projection() -> None:
    fused = torch.randn(2, 5, 4)
    before = fused.clone()
    apply_rotary(fused[:, :3], torch.zeros(2, 2), torch.ones(2, 2))
    assert torch.equal(fused[:, :3], torch.cat([-before[:, :3, 2:], before[:, :3, :2]], dim=-1))
    assert torch.equal(fused[:, 3:], before[:, 3:])
