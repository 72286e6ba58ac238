"""Groups of states by hand: which checkpoints there are, who finds them, and what is given up first."""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence
from penstock.core.speculation import Draft, Speculation
from tests.core.fakes import FakeRunner, digest, make_request, make_scheduler, run_step, run_to_end

SIZE = 4


def manager(num_states: int, every: int = 100, num_slots: int = 2) -> KVManager:
    return KVManager((CacheGroup(64), CacheGroup(num_states, checkpoint_every=every)), SIZE, num_slots)


def start(kv: KVManager, tokens: Iterable[int], num_prompt: int | None = None) -> Sequence:
    tokens = list(tokens)
    seq = Sequence(make_request("r", tokens[:num_prompt]), 0, 0)
    seq.tokens.extend(tokens[len(seq.tokens) :])
    assert kv.admit(seq, reserve=0) is None
    return seq


def compute(kv: KVManager, seq: Sequence, *ends: int) -> Sequence:
    """Compute a sequence's tokens in chunks that end there."""
    for end in ends:
        kv.extend_bounded([seq], [end - seq.num_computed])
        seq.num_computed = end
        kv.commit(seq)
        kv.check_integrity([seq])
    return seq


def checkpoints(kv: KVManager, tokens: Iterable[int]) -> list[int]:
    """At how many tokens of a text the tree has states."""
    path = kv.known_path(Sequence(make_request("probe", [*tokens, 99]), 0, 0))
    return [depth * SIZE for depth, node in enumerate(path, 1) if node.blocks[1] >= 0]


def test_a_later_turn_of_a_chat_hits_up_to_the_last_border_of_the_turn_before() -> None:
    kv = manager(8)
    seq = start(kv, range(23), num_prompt=15)
    compute(kv, seq, 10, 15, *range(16, 23))
    kv.release(seq)
    again = start(kv, [*range(23), 50, 51, 52])
    assert again.num_computed == 20


def test_the_same_prompt_hits_up_to_the_last_border_before_its_last_token() -> None:
    for length in (15, 16, 17):
        kv = manager(8)
        seq = compute(kv, start(kv, range(length + 10), length), length, *range(length + 1, length + 10))
        kv.release(seq)
        assert start(kv, range(length)).num_computed == (length - 1) // SIZE * SIZE


def test_states_that_are_superseded_are_given_up_and_those_at_the_ends_and_every_few_blocks_stay() -> None:
    kv = manager(20, every=6)
    seq = start(kv, range(60), num_prompt=22)
    compute(kv, seq, 9)
    assert checkpoints(kv, range(60)) == [8]
    compute(kv, seq, 18)
    assert checkpoints(kv, range(60)) == [16], "the first chunk's is superseded"
    compute(kv, seq, 22, 23)
    assert checkpoints(kv, range(60)) == [20]
    compute(kv, seq, 24, 25, 26, 27, 28)
    assert checkpoints(kv, range(60)) == [20, 24, 28]
    compute(kv, seq, 57)
    assert checkpoints(kv, range(60)) == [20, 24, 48, 56], "the prompt's end, every 6 blocks, the last"
    assert kv.pools[1].num_held == 1
    kv.release(seq)
    assert checkpoints(kv, range(60)) == [20, 24, 48, 56]
    assert kv.pools[1].num_idle == 4


def test_a_preempted_sequence_goes_on_from_the_last_border_of_its_last_chunk() -> None:
    kv = manager(4)
    seq = compute(kv, start(kv, range(40)), 11, 22, 33)
    kv.release(seq)
    assert kv.admit(seq, reserve=0) is None
    assert seq.num_computed == 32
    compute(kv, seq, 40)


def test_prompts_with_a_common_beginning_hit_it_from_the_third_on() -> None:
    kv = manager(10)
    for tail, hit in ((100, 0), (200, 0), (300, 20), (400, 20)):
        seq = start(kv, [*range(22), *range(tail, tail + 30)])
        assert seq.num_computed == hit
        kv.release(compute(kv, seq, 30, 52))


def test_the_least_recently_used_checkpoint_goes_first_and_all_that_fit_are_kept() -> None:
    kv = manager(6)
    texts = [[number] * 9 for number in range(6)]
    for text in texts:
        kv.release(compute(kv, start(kv, text), 9))
    kept = [bool(checkpoints(kv, text)) for text in texts]
    assert kept == [False, True, True, True, True, True], "a block is left for the live state"
    again = start(kv, [*texts[1], 1])
    assert again.num_computed == 8
    kv.release(again)
    kv.release(compute(kv, start(kv, [7] * 9), 9))
    assert [bool(checkpoints(kv, text)) for text in texts] == [False, True, False, True, True, True]


def test_a_pool_of_a_state_a_slot_is_enough_and_keeps_nothing_while_all_slots_are_taken() -> None:
    kv = manager(2)
    first, second = start(kv, range(20)), start(kv, range(100, 120))
    for end in (5, 9, 20):
        for seq in (first, second):
            kv.extend_bounded([seq], [end - seq.num_computed])
            seq.num_computed = end
            kv.commit(seq)
            kv.check_integrity([first, second])
    assert checkpoints(kv, range(20)) == []
    assert kv.pools[1].num_held == 2


def test_a_hit_becomes_the_live_state_where_no_other_block_can_be_spared() -> None:
    kv = manager(3)
    kv.release(compute(kv, start(kv, range(9)), 9))
    other = compute(kv, start(kv, range(50, 60)), 8)
    assert checkpoints(kv, range(9)) == [8]
    seq = start(kv, range(12))
    kv.check_integrity([seq, other])
    assert seq.num_computed == 8
    assert checkpoints(kv, range(9)) == [], "it is the sequence's own now"


def test_a_hit_that_another_sequence_holds_is_shared_and_stays_in_the_tree() -> None:
    kv = manager(3)
    first = compute(kv, start(kv, range(9)), 9)
    second = start(kv, range(12))
    kv.check_integrity([first, second])
    assert second.num_computed == 8
    assert checkpoints(kv, range(9)) == [8]


def test_without_prefix_caching_a_sequence_has_one_state() -> None:
    kv = KVManager((CacheGroup(64), CacheGroup(9, checkpoint_every=1)), SIZE, 2, enable_prefix_caching=False)
    seq = compute(kv, start(kv, range(60)), 30, 31, 32, 33, 60)
    assert kv.pools[1].num_held == 1
    kv.release(seq)


def hybrid(num_states: int, **options: int) -> tuple[Scheduler, FakeRunner]:
    groups = (CacheGroup(40), CacheGroup(num_states, checkpoint_every=3))
    return make_scheduler(groups=groups, **options), FakeRunner(groups, SIZE)


@pytest.mark.parametrize("budget", range(4, 24))
def test_chunks_of_any_size_make_the_same_answers(budget: int) -> None:
    scheduler, runner = hybrid(12, budget=budget)
    for number in range(5):
        scheduler.add_request(make_request(f"r{number}", [*range(5 * number + 3), 1], 9, n=1 + number % 2))
    alone, lonely = hybrid(5)
    for number in range(5):
        alone.add_request(make_request(f"r{number}", [*range(5 * number + 3), 1], 9, n=1 + number % 2))
    assert run_to_end(scheduler, runner).tokens == run_to_end(alone, lonely).tokens


def test_a_copied_state_is_dropped_with_the_sequence_that_it_was_for() -> None:
    scheduler, runner = hybrid(8)
    request = make_request("r", [1, 2, 3, 4, 5, 6], 6, n=3, stop_token_ids=())
    scheduler.add_request(replace(request))
    run_step(scheduler, runner)
    assert len(scheduler.kv._states[1]._copies) == 2
    scheduler.finish_request("r", 1, "abort")
    scheduler.check_integrity()
    assert len(scheduler.kv._states[1]._copies) == 1
    collected = run_to_end(scheduler, runner)
    assert len(collected.tokens["r", 2]) == 5, "the first came before"


def test_sequences_that_part_at_a_checkpoint_go_on_from_it_without_a_copy() -> None:
    scheduler, runner = hybrid(8)
    scheduler.add_request(make_request("r", range(10, 18), 6, n=3, stop_token_ids=()))
    run_step(scheduler, runner)
    assert scheduler.kv._states[1]._copies == []
    run_to_end(scheduler, runner)


def draft(kv: KVManager, seq: Sequence, guesses: list[int], right: int) -> int:
    """Compute a sequence's missing tokens and its drafts; the first `right` drafts are right.

    Returns how many guesses there was room for.
    """
    assert seq.num_returned or kv.make_room(seq, [])
    room = kv.begin_drafts(seq, len(guesses))
    draft_of(kv, seq, guesses[:room], min(right, room))
    kv.check_integrity([seq])
    return room


def draft_of(kv: KVManager, seq: Sequence, guesses: list[int], right: int) -> None:
    known, room = len(seq.tokens), len(guesses)
    lacking = known - seq.num_computed
    seq.tokens.extend(guesses)
    seq.num_drafts = room
    kv.extend_bounded([seq], [lacking + room])
    seq.num_drafts = 0
    if room:
        del seq.tokens[known + right :]
        kv.end_drafts(seq, right, room)
    else:
        seq.num_computed, seq.num_returned = known, 0
        kv.commit(seq)
    seq.tokens.append(99)


def test_right_drafts_stay_and_after_others_the_state_is_that_after_the_token_before() -> None:
    kv = manager(6)
    seq = compute(kv, start(kv, range(10)), 9)
    live = seq.tables[1].blocks[-1]
    assert draft(kv, seq, [1, 2], right=0) == 2
    assert (seq.num_computed, len(seq.tokens), seq.tables[1].blocks[-1]) == (10, 11, live)
    assert draft(kv, seq, [1], right=1) == 1
    assert (seq.num_computed, len(seq.tokens)) == (12, 13)
    assert seq.tables[1].blocks[2] != live
    assert draft(kv, seq, [1, 2, 3], right=2) == 3
    assert (seq.num_computed, len(seq.tokens)) == (13, 16)
    assert seq.num_returned == 2
    assert len(seq.tables[0].blocks) == 4, "there are blocks for the right ones, to compute them again"
    assert draft(kv, seq, [1, 2, 3, 4], right=4) == 4, "with guesses at once, up to the border at 20"
    assert (seq.num_computed, len(seq.tokens), seq.num_returned) == (20, 21, 0)


def test_drafts_end_at_borders_where_checkpoints_are_made_as_without_them() -> None:
    kv = manager(9)
    seq = compute(kv, start(kv, range(10), 6), 9)
    assert draft(kv, seq, [1] * 8, right=8) == 2, "from 10 to 12"
    assert seq.num_computed == 12
    assert checkpoints(kv, seq.tokens) == [4, 12], "the prompt's end and the last"
    seq.tokens.extend([5, 6, 7])
    assert kv.grow(seq, 3) == 3
    compute(kv, seq, 15)
    assert draft(kv, seq, [1] * 8, right=8) == 4, "from 16 to 20"
    assert checkpoints(kv, seq.tokens) == [4, 20]


def test_where_no_block_can_be_spared_nothing_is_drafted() -> None:
    kv = manager(2)
    first, second = start(kv, range(10)), start(kv, range(50, 60))
    for seq in (first, second):
        kv.extend_bounded([seq], [9])
        seq.num_computed = 9
        kv.commit(seq)
    assert kv.begin_drafts(first, 3) == 0
    kv.release(second)
    assert kv.begin_drafts(first, 3) == 0, "the other slot is owed its block"


def test_a_sequence_that_ends_while_drafts_are_computed_gives_their_state_back() -> None:
    kv = manager(6)
    seq = compute(kv, start(kv, range(10)), 9)
    assert kv.begin_drafts(seq, 2) == 2
    assert kv.pools[1].num_held == 2
    kv.release(seq)
    assert kv.pools[1].num_held == 0
    kv.check_integrity([])


@settings(max_examples=150, deadline=None)
@given(
    spare=st.integers(0, 5),
    every=st.integers(1, 3),
    caching=st.booleans(),
    moves=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["draft", "draft", "chunk", "fork", "leave"]), st.integers(0, 6)),
        max_size=60,
    ),
    right=st.randoms(use_true_random=False),
)
def test_whatever_is_drafted_forked_and_left_the_tables_stay_sound(
    spare: int, every: int, caching: bool, moves: list[tuple[int, str, int]], right: Random
) -> None:
    groups = (CacheGroup(200), CacheGroup(3 + spare, checkpoint_every=every))
    kv = KVManager(groups, SIZE, 3, enable_prefix_caching=caching)
    sequences: list[Sequence | None] = [None] * 3
    for place, move, count in moves:
        kv.drain_copies()  # as each step makes them
        seq = sequences[place]
        if seq is None:
            sequences[place] = start(kv, [*range(3 * count), 9, 8])
        elif move == "leave" or len(seq.tokens) > 90:
            kv.release(seq)
            sequences[place] = None
        elif move == "fork" and None in sequences and seq.num_computed == len(seq.tokens) - 1 and seq.num_computed:
            child = Sequence(seq.request, 1, 0)
            child.tokens = seq.tokens[:]
            kv.fork(seq, child)
            sequences[sequences.index(None)] = child
        elif move == "draft" and seq.num_computed + seq.num_returned == len(seq.tokens) - 1:
            assert seq.num_returned or kv.make_room(seq, [])
            room = kv.begin_drafts(seq, right.randint(0, 6))
            draft_of(kv, seq, [right.randint(0, 2) for _ in range(room)], right.randint(0, room))
        elif seq.num_computed < len(seq.tokens):
            end = min(len(seq.tokens), seq.num_computed + 1 + count)
            assert kv.grow(seq, end - seq.num_computed) == end - seq.num_computed
            assert kv.make_room(seq, [])
            kv.extend_bounded([seq], [end - seq.num_computed])
            seq.num_computed, seq.num_returned = end, 0
            kv.commit(seq)
            if end == len(seq.tokens):
                seq.tokens.append(count)
        kv.check_integrity([seq for seq in sequences if seq is not None])


class HalfRight:
    """Guesses four tokens; the first two are right."""

    free = True

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.asked = 0

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        self.asked += len(wanted)
        return [self._guess(seq)[:limit] for seq, limit in wanted]

    def _guess(self, seq: Sequence) -> Draft:
        text = seq.tokens.tolist()
        for place in range(4):
            token = self.runner.next_token(digest(text), seq.index)
            text.append(token if place < 2 else (token + 1) % self.runner.vocab)
        return array("i", text[-4:])

    def forget_sequence(self, seq: Sequence) -> None:
        pass


def test_a_sequence_that_returned_goes_on_before_prompts_and_has_drafts_in_the_same_step() -> None:
    groups = (CacheGroup(60), CacheGroup(12, checkpoint_every=3))
    runner = FakeRunner(groups, SIZE)
    drafter = HalfRight(runner)
    speculation = Speculation([drafter], 4, lambda: 0.0)
    scheduler = make_scheduler(groups=groups, budget=12, speculation=speculation)
    scheduler.add_request(make_request("first", range(5), 24, stop_token_ids=()))
    returned = 0
    for step in range(20):
        if step == 4:
            scheduler.add_request(make_request("long", range(30, 80), 2, stop_token_ids=()))
        if not scheduler.has_work:
            break
        before = {seq.request_id: (seq, len(seq.tokens), seq.num_returned) for seq in scheduler.running}
        run_step(scheduler, runner)
        if "first" in before:
            seq, known, had_returned = before["first"]
            assert len(seq.tokens) > known, "each step brings a token"
            returned += had_returned > 0
    assert returned > 2
    assert scheduler.num_drafted > 4 * returned > 0, "most of these steps had drafts"
