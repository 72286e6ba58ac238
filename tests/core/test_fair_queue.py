"""The fair queue: by hand, and its stated bound under random traffic through the real scheduler."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.request import FinishReason
from penstock.core.fairness import ANSWER_WEIGHT, PROMPT_WEIGHT, FairQueue
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence
from tests.core.fakes import FakeRunner, make_request, run_step, run_to_end

MAX_NUM_SEQS = 3
LONGEST_PROMPT, LONGEST_ANSWER = 12, 8
U = MAX_NUM_SEQS * (PROMPT_WEIGHT * LONGEST_PROMPT + ANSWER_WEIGHT * LONGEST_ANSWER)


def make_fair_scheduler(num_blocks: int = 16, max_num_seqs: int = MAX_NUM_SEQS) -> tuple[Scheduler, FairQueue]:
    queue = FairQueue()
    kv = KVManager((CacheGroup(num_blocks),), 4, 64)
    return Scheduler(kv, queue, max_num_seqs=max_num_seqs, max_num_batched_tokens=6, clock=lambda: 0.0), queue


def waiting(queue: FairQueue) -> list[str]:
    return [seq.request_id for seq in queue.in_order()]


def admit(queue: FairQueue, seq: Sequence) -> None:
    """Its prompt is computed in the same step."""
    queue.admit(seq)
    queue.prefilled(seq, len(seq.tokens))


def drain(queue: FairQueue) -> list[str]:
    """The order of admission, one after another."""
    admitted = []
    while (seq := queue.peek()) is not None:
        admit(queue, seq)
        admitted.append(seq.request_id)
    return admitted


def push(queue: FairQueue, name: str, prompt_length: int, ordinal: int, priority: int = 0) -> Sequence:
    """Its tenant is the first letter of its name."""
    seq = Sequence(make_request(name, [1] * prompt_length, tenant=name[0], priority=priority), 0, ordinal)
    queue.push(seq)
    return seq


def test_tenants_take_turns_by_tokens_not_by_requests() -> None:
    queue = FairQueue()
    for i in range(4):
        push(queue, f"a{i}", 10, i)
    for i in range(4):
        push(queue, f"b{i}", 5, 4 + i)
    expected = ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]
    assert waiting(queue) == expected
    assert drain(queue) == expected


def test_one_tenant_alone_is_served_in_order_of_priority_and_arrival() -> None:
    queue = FairQueue()
    for i, priority in enumerate([1, 0, 0, 1]):
        push(queue, f"a{i}", 3, i, priority)
    assert drain(queue) == ["a1", "a2", "a0", "a3"]


def test_generated_tokens_count_against_the_next_turn() -> None:
    queue = FairQueue()
    first = push(queue, "a0", 2, 0)
    push(queue, "a1", 2, 1)
    push(queue, "b0", 2, 2)
    push(queue, "b1", 2, 3)
    admit(queue, first)
    queue.served([first] * 3)
    assert queue.counter("a") == 2 * PROMPT_WEIGHT + 3 * ANSWER_WEIGHT
    assert drain(queue) == ["b0", "b1", "a1"]


def test_many_tokens_told_at_once_count_as_those_told_one_by_one() -> None:
    counters = []
    for told in ([5], [1] * 5, [2, 3]):
        queue = FairQueue()
        seq = push(queue, "a0", 4, 0)
        queue.admit(seq)
        for count in told:
            queue.served([seq], count)
        counters.append(queue.counter("a"))
    assert counters == [4 * PROMPT_WEIGHT + 5 * ANSWER_WEIGHT] * 3


def test_a_tenant_saves_nothing_up_by_being_quiet() -> None:
    queue = FairQueue()
    for i in range(9):
        push(queue, f"a{i}", 10, i)
    for _ in range(6):
        admit(queue, queue.peek())
    for i in range(3):
        push(queue, f"b{i}", 10, 10 + i)
    assert drain(queue) == ["a6", "b0", "a7", "b1", "a8", "b2"]


def test_debts_are_forgiven_when_nobody_waits() -> None:
    queue = FairQueue()
    for i in range(5):
        admit(queue, push(queue, f"a{i}", 100, i))
    for i in range(2):
        push(queue, f"b{i}", 10, 5 + i)
        push(queue, f"a{5 + i}", 10, 7 + i)
    assert drain(queue) == ["b0", "a5", "b1", "a6"]


def test_a_preempted_sequence_returns_before_all_that_never_ran_and_is_charged_once() -> None:
    queue = FairQueue()
    first = push(queue, "a0", 10, 0)
    admit(queue, first)
    charged = queue.counter("a")
    push(queue, "b0", 1, 1)
    queue.push(first)
    assert waiting(queue) == ["a0", "b0"]
    assert drain(queue) == ["a0", "b0"]
    assert queue.counter("a") == charged


def test_what_the_prefix_cache_holds_is_not_charged() -> None:
    scheduler, queue = make_fair_scheduler()
    runner = FakeRunner(16, 4)
    for name in ("one", "two"):
        before = queue.counter("t")
        scheduler.add_request(make_request(name, [1] * 9, 1, tenant="t"))
        run_to_end(scheduler, runner)
        computed = 9 if name == "one" else 1
        assert queue.counter("t") - before == computed * PROMPT_WEIGHT + ANSWER_WEIGHT


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    queue = FairQueue()
    push(queue, "a0", 1, 0)
    for i in range(1000):
        queue.remove(push(queue, "b0", 1, i))
    assert len(queue._counters._active) < 20
    assert drain(queue) == ["a0"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), num_blocks=st.integers(5, 14), num_tenants=st.integers(2, 4))
def test_no_tenant_is_ever_ahead_of_one_that_waits_by_more_than_the_bound(
    seed: int, num_blocks: int, num_tenants: int
) -> None:
    rng = random.Random(seed)
    scheduler, queue = make_fair_scheduler(num_blocks)
    runner = FakeRunner(num_blocks, 4)
    tenants = [f"t{i}" for i in range(num_tenants)]
    for step in range(80):
        for _ in range(rng.choice([0, 0, 1, 4])):
            prompt = [rng.randrange(4) for _ in range(rng.randint(1, LONGEST_PROMPT))]
            name, n = f"r{step}.{rng.random()}", rng.choice([1, 1, 2])
            tenant = tenants[min(rng.randrange(8), num_tenants - 1)]  # the last one floods
            scheduler.add_request(make_request(name, prompt, rng.randint(1, LONGEST_ANSWER), n=n, tenant=tenant))
        if rng.random() < 0.1 and queue.peek() is not None:
            scheduler.finish_request(rng.choice(waiting(queue)), None, FinishReason.ABORT)
        run_step(scheduler, runner)
        for behind in {seq.request.tenant for seq in queue.in_order()}:
            for other in tenants:
                assert queue.counter(other) <= queue.counter(behind) + U


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), num_blocks=st.integers(6, 12), warm_up=st.integers(0, 30))
def test_a_flood_of_one_tenant_cannot_push_anothers_request_past_the_stated_bound(
    seed: int, num_blocks: int, warm_up: int
) -> None:
    rng = random.Random(seed)
    scheduler, queue = make_fair_scheduler(num_blocks)
    runner = FakeRunner(num_blocks, 4)
    longest = LONGEST_PROMPT + LONGEST_ANSWER

    def flood(step: int) -> None:
        for i in range(5):
            prompt = [rng.randrange(4) for _ in range(rng.randint(1, LONGEST_PROMPT))]
            scheduler.add_request(make_request(f"flood{step}.{i}", prompt, LONGEST_ANSWER, tenant="loud"))

    for step in range(warm_up):
        flood(-step - 1)
        run_step(scheduler, runner)
    scheduler.add_request(make_request("mine", [1, 2, 3, 4, 5], 5, tenant="quiet"))
    overtaken = len(waiting(queue)[: waiting(queue).index("mine")])
    assert overtaken <= MAX_NUM_SEQS + 1, "only those that were admitted before, and one more"
    bound = (overtaken + scheduler.num_running + 1) * (longest + MAX_NUM_SEQS * longest)
    for step in range(bound):
        flood(step)
        if any(o.request_id == "mine" and o.finish_reason is not None for o in run_step(scheduler, runner)):
            return
    raise AssertionError(f"not at its end after {bound} steps")


def test_answers_that_found_no_slot_wait_for_their_turn_and_are_charged_for_the_prompt_that_they_compute_again() -> (
    None
):
    queue = FairQueue()
    kv = KVManager((CacheGroup(16),), 4, 64, enable_prefix_caching=False)
    scheduler = Scheduler(kv, queue, max_num_seqs=1, max_num_batched_tokens=6, clock=lambda: 0.0)
    scheduler.add_request(make_request("a", [1, 2, 3, 4, 5], 2, n=3, stop_token_ids=(), tenant="a"))
    run_to_end(scheduler, FakeRunner(16, 4))
    assert queue.counter("a") == 3 * (5 * PROMPT_WEIGHT + 2 * ANSWER_WEIGHT)
