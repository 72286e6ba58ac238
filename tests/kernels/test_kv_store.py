import torch

from penstock.kernels.kv_store import copy_blocks, store_kv


def test_each_token_goes_to_its_slot_and_nothing_else_changes() -> None:
    cache = [torch.zeros(5, 4, 2, 3) for _ in range(2)]
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    slots = [6, 0, 19]
    store_kv(key, value, cache[0], cache[1], torch.tensor(slots))
    for content, stored in ((key, cache[0]), (value, cache[1])):
        for row, slot in enumerate(slots):
            assert torch.equal(stored[slot // 4, slot % 4], content[row])
            stored[slot // 4, slot % 4] = 0
        assert not stored.any()


def test_keys_are_converted_to_the_type_of_the_cache() -> None:
    key_cache, value_cache = (torch.zeros(1, 2, 1, 4, dtype=torch.bfloat16) for _ in range(2))
    key = torch.randn(1, 1, 4)
    store_kv(key, key, key_cache, value_cache, torch.tensor([1]))
    assert torch.equal(key_cache[0, 1], key[0].bfloat16())


def test_keys_and_values_may_be_views_into_a_fused_projection() -> None:
    fused = torch.randn(2, 6, 3)
    key_cache, value_cache = torch.zeros(2, 2, 2, 3), torch.zeros(2, 2, 2, 3)
    store_kv(fused[:, 2:4], fused[:, 4:], key_cache, value_cache, torch.tensor([3, 0]))
    assert torch.equal(key_cache[1, 1], fused[0, 2:4])
    assert torch.equal(value_cache[0, 0], fused[1, 4:])


def test_copied_blocks_equal_their_sources_as_they_were_before() -> None:
    cache = torch.randn(4, 2, 1, 3)
    before = cache.clone()
    copy_blocks(cache, torch.tensor([0, 1, 0]), torch.tensor([2, 0, 3]))
    assert torch.equal(cache, before[[1, 1, 0, 0]])
