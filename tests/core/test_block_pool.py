"""The pool of blocks: three states, and nothing that passes from one to another unseen."""

import pytest

from penstock.core.prefix_cache import FREE, BlockPool


def test_a_block_goes_from_free_to_held_to_idle_to_free() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert block is not None
    assert (pool.num_free, pool.num_held, pool.num_idle) == (1, 1, 0)
    assert pool.drop(block)
    assert (pool.num_free, pool.num_held, pool.num_idle) == (1, 0, 1)
    pool.free(block)
    assert pool.refs(block) == FREE
    pool.check_integrity(held=[], cached=[])


def test_a_shared_block_is_idle_only_after_its_last_holder_dropped_it() -> None:
    pool = BlockPool(1)
    block = pool.take()
    assert block is not None
    assert not pool.hold(block)
    assert not pool.drop(block)
    assert pool.drop(block)
    assert pool.hold(block)


def test_an_empty_pool_gives_none() -> None:
    pool = BlockPool(1)
    pool.take()
    assert pool.take() is None


@pytest.mark.parametrize("misuse", ["free twice", "free while held", "drop twice", "hold a free one"])
def test_misuse_fails_at_once(misuse: str) -> None:
    pool = BlockPool(1)
    block = pool.take()
    assert block is not None
    if misuse == "free while held":
        action = pool.free
    else:
        pool.drop(block)
        action = pool.drop
        if misuse != "drop twice":
            pool.free(block)
            action = pool.free if misuse == "free twice" else pool.hold
    with pytest.raises(AssertionError):
        action(block)


def test_check_integrity_finds_a_leak_and_a_wrong_count() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert block is not None
    pool.check_integrity(held=[block], cached=[])
    with pytest.raises(AssertionError, match="held by 2"):
        pool.check_integrity(held=[block, block], cached=[])
    pool.drop(block)
    with pytest.raises(AssertionError, match="leaked"):
        pool.check_integrity(held=[], cached=[])
