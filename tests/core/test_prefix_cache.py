"""The prefix tree by hand: what hits, what does not, and what is evicted first."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.block_keys import block_keys
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.sequence import Sequence
from tests.core.fakes import make_request

SIZE = 4


def computed(kv: KVManager, tokens: list[int], namespace: str = "") -> Sequence:
    """A sequence whose tokens have all been computed and committed."""
    seq = Sequence(make_request("r", tokens, namespace=namespace), 0, 0)
    assert kv.admit(seq, reserve=0) is None
    seq.num_computed = len(tokens)
    kv.commit(seq)
    return seq


def hit(kv: KVManager, tokens: list[int], namespace: str = "") -> list[int]:
    """The cached blocks that a prompt would begin with."""
    path = kv.cache.match(namespace, block_keys(array("i", tokens), (), SIZE, len(tokens) // SIZE))
    return [node.blocks[0] for node in path]


def test_a_prompt_hits_the_full_blocks_it_shares_and_no_more() -> None:
    kv = KVManager((CacheGroup(8),), SIZE, 8)
    seq = computed(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks = list(seq.tables[0].blocks)
    assert hit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]) == blocks[:2]
    assert hit(kv, [1, 2, 3, 4, 5, 6, 7, 0]) == blocks[:1]
    assert hit(kv, [1, 2, 3, 0]) == []
    assert hit(kv, [5, 6, 7, 8]) == [], "a block hits only after the same beginning"


def test_what_is_allocated_but_not_computed_is_never_hit() -> None:
    kv = KVManager((CacheGroup(8),), SIZE, 8)
    seq = Sequence(make_request("r", [1] * 8), 0, 0)
    assert kv.admit(seq, reserve=0) is None
    assert hit(kv, [1] * 8) == []
    seq.num_computed = 5
    kv.commit(seq)
    assert hit(kv, [1] * 8) == [seq.tables[0].blocks[0]]


def test_an_admitted_sequence_leaves_its_last_token_to_compute_even_if_all_is_cached() -> None:
    kv = KVManager((CacheGroup(8),), SIZE, 8)
    kv.release(computed(kv, [1] * 8))
    seq = Sequence(make_request("r", [1] * 8), 0, 0)
    assert kv.admit(seq, reserve=0) is None
    assert seq.num_computed == 4


def test_namespaces_share_nothing_and_cost_nothing_once_they_are_gone() -> None:
    kv = KVManager((CacheGroup(2),), SIZE, 8)
    kv.release(computed(kv, [1] * 8, namespace="a"))
    assert hit(kv, [1] * 8, namespace="b") == []
    kv.release(computed(kv, [1] * 8, namespace="b"))  # needs both blocks: all of a is evicted
    assert hit(kv, [1] * 8, namespace="a") == []
    assert set(kv.cache._roots) == {"b"}


def test_the_least_recently_used_leaf_is_evicted_first_and_deepest_first() -> None:
    kv = KVManager((CacheGroup(4),), SIZE, 8)
    kv.release(computed(kv, [1] * 4 + [2] * 4))
    kv.release(computed(kv, [3] * 4 + [4] * 4))
    kv.release(computed(kv, [1] * 4 + [2] * 4))  # used again: now the youngest
    live = [computed(kv, [9] * 4)]
    assert len(hit(kv, [3] * 4 + [4] * 4)) == 1, "the oldest path lost its leaf"
    assert len(hit(kv, [1] * 4 + [2] * 4)) == 2
    live.append(computed(kv, [8] * 4))
    kv.check_integrity(live)
    assert hit(kv, [3] * 4) == []
    assert len(hit(kv, [1] * 4 + [2] * 4)) == 2


def test_two_sequences_that_computed_the_same_block_end_up_on_one() -> None:
    kv = KVManager((CacheGroup(8),), SIZE, 8)
    first = Sequence(make_request("a", [1] * 9), 0, 0)
    second = Sequence(make_request("b", [1] * 9), 0, 1)
    for seq in (first, second):
        assert kv.admit(seq, reserve=0) is None
    for seq in (first, second):
        seq.num_computed = 8
        kv.commit(seq)
        kv.check_integrity([first, second])
    assert list(first.tables[0].blocks[:2]) == list(second.tables[0].blocks[:2])
    kv.release(first)
    kv.check_integrity([second])
    kv.release(second)
    assert kv.num_available == 8


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=14)), max_size=30))
def test_hits_are_always_the_longest_computed_beginning(operations: list[tuple[bool, list[int]]]) -> None:
    """Against a model: with a pool too large to evict, a hit is the longest run of blocks ever computed."""
    kv = KVManager((CacheGroup(200),), 2, 30)
    known: set[tuple[int, ...]] = set()
    live: list[Sequence] = []
    for release, tokens in operations:
        seq = Sequence(make_request("r", tokens), 0, 0)
        expected = 0
        while (expected + 1) * 2 < len(tokens) and tuple(tokens[: (expected + 1) * 2]) in known:
            expected += 1
        assert kv.admit(seq, reserve=0) is None
        assert seq.num_computed == expected * 2
        seq.num_computed = len(tokens)
        kv.commit(seq)
        known.update(tuple(tokens[:end]) for end in range(2, len(tokens) + 1, 2))
        live.append(seq)
        if release:
            kv.release(live.pop(0))
        kv.check_integrity(live)


def windowed(*windows: int | None, num_blocks: int = 16) -> KVManager:
    return KVManager(tuple(CacheGroup(num_blocks, window) for window in windows), SIZE, 8)


def test_a_path_is_a_hit_only_as_far_as_each_window_is_there() -> None:
    kv = windowed(None, 6)
    seq = Sequence(make_request("r", range(40)), 0, 0)
    assert kv.admit(seq, reserve=0) is None
    for end in (16, 32, 40):  # in chunks: what is behind the window of each goes
        kv.extend_bounded([seq], [end - seq.num_computed])
        seq.num_computed = end
        kv.commit(seq)
        kv.check_integrity([seq])
    assert [table.first for table in seq.tables] == [0, 8], "a query at 40 sees the keys from 35 on"
    kv.release(seq)
    again = Sequence(make_request("again", [*range(40), 99]), 0, 1)
    assert kv.admit(again, reserve=0) is None
    assert again.num_computed == 40
    kv.release(again)
    while kv.cache.evict(1) is not None:
        pass
    assert len(kv._match(again)) == 0, "the layers that see all would have hit"


def test_evicting_a_window_leaves_what_lies_below_it_reachable() -> None:
    kv = windowed(6, num_blocks=8)
    first = Sequence(make_request("r", range(32)), 0, 0)
    assert kv.admit(first, reserve=0) is None
    first.num_computed = 32
    kv.commit(first)
    kv.release(first)
    for _ in range(5):
        evicted = kv.cache.evict(0)
        assert evicted is not None
        kv.pools[0].free(evicted)
        kv.check_integrity([])
    assert len(kv._match(Sequence(make_request("a", [*range(32), 9]), 0, 1))) == 8, "the oldest of the path went first"
