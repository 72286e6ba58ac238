"""Shares of slots and blocks between tenants: claims by hand, and their stated bounds under random traffic."""

import math
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.request import Request, SequenceOutput
from penstock.core.fairness import Claim, Shares
from penstock.core.policies import TgiAdmission
from penstock.core.scheduler import Scheduler
from penstock.core.step import Step
from tests.core.fakes import FakeRunner, expected_answer, make_request, make_scheduler, run_step, run_to_end

NEVER = ()  # no stop tokens: a sequence runs to its max_tokens
LONGEST_PROMPT, LONGEST_ANSWER = 12, 8


def fair(num_blocks: int = 64, max_num_seqs: int = 4, budget: int = 16, **options) -> Scheduler:
    return make_scheduler(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, policy="fair", **options)


def add(scheduler: Scheduler, tenant: str, *names: str, prompt: int = 4, max_tokens: int = 20, n: int = 1) -> None:
    for name in names:
        tokens = [ord(name), *range(1, prompt)]
        request = make_request(name, tokens, max_tokens, n=n, stop_token_ids=NEVER, tenant=tenant)
        scheduler.add_request(request)


def running(scheduler: Scheduler) -> list[str]:
    return sorted(seq.request_id for seq in scheduler._sequences.running)


def test_a_tenant_that_was_quiet_takes_a_slot_of_one_that_holds_all() -> None:
    scheduler, runner = fair(), FakeRunner(64, 4)
    add(scheduler, "loud", "a", "b", "c", "d", "e", "f")
    for _ in range(4):
        run_step(scheduler, runner)
    assert running(scheduler) == ["a", "b", "c", "d"]
    add(scheduler, "quiet", "q")
    outputs = run_step(scheduler, runner)
    assert "q" in {output.request_id for output in outputs}, "its first token comes with the next step"
    assert scheduler.trace.admitted == [("q", 0)]
    assert scheduler.trace.preempted == ["d"], "the one that had least"
    assert run_to_end(scheduler, runner).endings.keys() >= {(name, 0) for name in "abcdefq"}


def test_a_prompt_of_a_quiet_tenant_is_computed_before_those_of_one_that_floods() -> None:
    scheduler, runner = fair(num_blocks=200, max_num_seqs=8, budget=24), FakeRunner(200, 4)
    add(scheduler, "loud", *"abcdefg", prompt=60)
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q", prompt=16)
    run_step(scheduler, runner)
    assert ("q", 16) in scheduler.trace.chunks
    assert not scheduler.trace.preempted, "there was a slot"


def test_a_tenant_takes_no_more_than_its_share() -> None:
    scheduler, runner = fair(budget=32), FakeRunner(64, 4)
    add(scheduler, "loud", *"abcdef")
    run_step(scheduler, runner)
    add(scheduler, "quiet", *"qrst")
    for _ in range(8):
        run_step(scheduler, runner)
        assert running(scheduler) == ["a", "b", "q", "r"]
    assert scheduler.num_preemptions == 2


def test_blocks_are_taken_from_the_tenant_that_holds_most_and_no_more_than_needed() -> None:
    scheduler, runner = fair(num_blocks=16, max_num_seqs=8, budget=64), FakeRunner(16, 4)
    add(scheduler, "loud", "a", "b", "c", prompt=14, max_tokens=3)
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q", prompt=6)
    assert [output.request_id for output in run_step(scheduler, runner)] == ["a", "b", "q"]
    assert scheduler.trace.preempted == ["c"]


def test_nobody_is_preempted_for_a_sequence_that_would_not_fit_its_share() -> None:
    scheduler, runner = fair(num_blocks=16, max_num_seqs=8, budget=64), FakeRunner(16, 4)
    add(scheduler, "loud", "a", "b", "c", prompt=14, max_tokens=3)
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q", prompt=40)
    run_step(scheduler, runner)
    assert not scheduler.trace.preempted
    assert run_to_end(scheduler, runner).endings.keys() >= {("q", 0)}


def test_the_oldest_is_not_preempted_though_its_tenant_is_above_its_share() -> None:
    scheduler, runner = fair(num_blocks=16, max_num_seqs=8, budget=64), FakeRunner(16, 4)
    add(scheduler, "loud", "a", prompt=50, max_tokens=3)
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q", prompt=12)
    run_step(scheduler, runner)
    assert running(scheduler) == ["a"]


def test_the_oldest_gets_a_token_while_the_prompts_of_another_tenant_go_first() -> None:
    scheduler, runner = fair(budget=8), FakeRunner(64, 4)
    add(scheduler, "loud", "a", prompt=60)
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q", prompt=30)
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.forward.starts, plan.forward.query_lens) == ([0, 8], [7, 1])


def test_claims_without_end_do_not_keep_a_preempted_sequence_from_running() -> None:
    scheduler, runner = fair(num_blocks=20, budget=64), FakeRunner(20, 4)
    add(scheduler, "large", "o", max_tokens=12)
    add(scheduler, "large", "l", prompt=58, max_tokens=18)
    run_step(scheduler, runner)
    preempted = False
    for number in range(300):
        if number % 3 == 0:
            tokens = [number % 20, *range(16)]
            scheduler.add_request(make_request(f"s{number}", tokens, 8, stop_token_ids=NEVER, tenant="small"))
        outputs = run_step(scheduler, runner)
        preempted = preempted or "l" in scheduler.trace.preempted
        if any(output.request_id == "l" and output.finish_reason is not None for output in outputs):
            assert preempted, "it was to lose its blocks"
            return
    raise AssertionError("it never ended")


def test_a_copy_is_not_made_for_a_sequence_that_is_preempted_in_the_same_step() -> None:
    scheduler, runner = fair(), FakeRunner(64, 4)
    add(scheduler, "loud", "a", prompt=6, n=2)
    run_step(scheduler, runner)
    first, second = scheduler._sequences.running
    step = Step(16, 16)
    assert scheduler.kv.make_room(first, step.copies)
    assert len(step.copies) == 1
    scheduler._preempt(first, step)
    assert not step.copies
    assert second.tables


def test_whoever_lacks_a_block_takes_it_from_the_tenant_that_is_above_its_share() -> None:
    scheduler, runner = fair(num_blocks=12, max_num_seqs=4, budget=64), FakeRunner(12, 4)
    add(scheduler, "loud", "a", "b", prompt=12, max_tokens=12)
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q", prompt=3, max_tokens=12)
    victims = []
    while scheduler.has_work:
        run_step(scheduler, runner)
        victims += scheduler.trace.preempted
    assert victims
    assert set(victims) == {"b"}


def test_tenants_are_no_concern_of_a_policy_that_does_not_share() -> None:
    scheduler, runner = make_scheduler(policy="fcfs", max_num_seqs=2), FakeRunner(16, 4)
    add(scheduler, "loud", "a", "b", "c")
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q")
    run_step(scheduler, runner)
    assert running(scheduler) == ["a", "b"]


def test_a_claim_waits_for_an_admission_policy_that_lets_nobody_join() -> None:
    admission = TgiAdmission(
        block_size=4,
        max_batch_prefill_tokens=None,
        max_batch_total_tokens=100,
        waiting_served_ratio=0.0,
        max_waiting_tokens=20,
    )
    scheduler, runner = fair(budget=32, admission=admission), FakeRunner(64, 4)
    add(scheduler, "loud", "a", "b", "c", "d", max_tokens=20)
    run_step(scheduler, runner)
    add(scheduler, "quiet", "q", max_tokens=60)
    run_step(scheduler, runner)
    assert running(scheduler) == ["a", "b", "c", "d"]
    assert run_to_end(scheduler, runner).endings.keys() == {(name, 0) for name in "abcdq"}


class WatchedShares(Shares):
    """Checks what is promised of each claim."""

    num_claims = 0
    num_victims = 0

    def claim(self, num_tokens: int, spared: Request | None) -> Claim | None:
        claim = super().claim(num_tokens, spared)
        if claim is None:
            return None
        held = self._holdings()
        tenant, share = claim.seq.request.tenant, max(1, self._max_num_seqs // len(held))
        assert sum(seq.num_slots for seq in held[tenant]) + claim.seq.min_slots <= share
        oldest = next(iter(self._sequences.running), None)
        for number, victim in enumerate(claim.victims):
            other = victim.request.tenant
            assert victim is not oldest
            assert other != tenant
            left = [seq for seq in held[other] if seq not in claim.victims[:number]]
            blocks = {block for seq in left for block in seq.tables[0].held}
            above = sum(seq.num_slots for seq in left) > share or len(blocks) > self._kv.pool.num_blocks // len(held)
            assert above, "it was within its share"
        needless, free = claim.victims[:-1], self._sequences.num_free_slots
        if claim.donor is not None:
            assert free < claim.seq.min_slots
            assert claim.donor.num_slots + free > claim.seq.min_slots
            assert claim.donor not in claim.victims
            free = claim.seq.min_slots
        free += sum(seq.num_slots for seq in needless)
        if claim.victims and free >= claim.seq.min_slots:
            assert self._kv.missing(claim.seq, self._max_num_seqs - free, needless), "one victim too many"
        self.num_claims += 1
        self.num_victims += len(claim.victims)
        return claim


def watched(scheduler: Scheduler) -> WatchedShares:
    shares = WatchedShares(scheduler.kv, scheduler._sequences, scheduler._max_num_seqs)
    scheduler._shares = shares
    return shares


def random_request(rng: random.Random, name: str, tenant: str, longest_prompt: int = LONGEST_PROMPT) -> Request:
    prompt = [rng.randrange(4) for _ in range(rng.randint(1, longest_prompt))]
    return make_request(name, prompt, rng.randint(1, LONGEST_ANSWER), n=rng.choice([1, 1, 1, 3]), tenant=tenant)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 100_000),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(2, 8),
    num_tenants=st.integers(2, 4),
    caching=st.booleans(),
)
def test_every_answer_is_its_own_and_claims_keep_what_is_promised_of_them(
    seed: int, num_blocks: int, max_num_seqs: int, num_tenants: int, caching: bool
) -> None:
    rng = random.Random(seed)
    scheduler = fair(num_blocks, max_num_seqs, max_num_seqs + rng.randint(0, 12), caching=caching)
    shares, runner = watched(scheduler), FakeRunner(num_blocks, 4)
    requests: dict[str, Request] = {}
    answers: dict[tuple[str, int], list[int]] = {}

    def take(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            answers.setdefault((output.request_id, output.index), []).extend(output.token_ids)

    for step in range(60):
        for _ in range(rng.choice([0, 0, 1, 3])):
            tenant = f"t{min(rng.randrange(8), num_tenants - 1)}"  # the last one floods
            request = random_request(rng, f"r{step}.{rng.random()}", tenant)
            requests[request.request_id] = request
            scheduler.add_request(request)
        take(run_step(scheduler, runner))
    for _ in range(10_000):
        if not scheduler.has_work:
            break
        take(run_step(scheduler, runner))
    assert not scheduler.has_work
    for request in requests.values():
        for index in range(request.params.n):
            assert answers[request.request_id, index] == expected_answer(runner, request, index)[0]
    assert shares.num_victims <= scheduler.num_preemptions


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 100_000),
    warm_up=st.integers(0, 40),
    max_num_seqs=st.integers(2, 8),
    extra=st.integers(1, 20),
    num_tenants=st.integers(2, 4),
    longest=st.sampled_from([LONGEST_PROMPT, 40]),
)
def test_the_first_token_of_a_tenant_that_was_quiet_comes_within_the_stated_bound(
    seed: int, warm_up: int, max_num_seqs: int, extra: int, num_tenants: int, longest: int
) -> None:
    rng = random.Random(seed)
    budget = max_num_seqs + extra
    share = -(-longest // 4) + max_num_seqs  # the prompt's blocks, and the reserve
    num_blocks = num_tenants * share + -(-(longest + LONGEST_ANSWER) // 4)  # and the oldest's
    scheduler, runner = fair(num_blocks, max_num_seqs, budget), FakeRunner(num_blocks, 4)
    shares = watched(scheduler)
    loud = [f"loud{i}" for i in range(num_tenants - 1)]

    def flood(step: int) -> None:
        for i in range(rng.randint(0, 5)):
            scheduler.add_request(random_request(rng, f"flood{step}.{i}", rng.choice(loud), longest))

    for step in range(warm_up):
        flood(step)
        run_step(scheduler, runner)
    mine = random_request(rng, "mine", "quiet", longest)
    scheduler.add_request(mine)
    length, step_tokens = len(mine.prompt_token_ids), budget - max_num_seqs
    bound = num_tenants + math.floor(num_tenants * (length + 2 * budget) / step_tokens) + 1
    before = shares.num_claims
    under_way = sum(len(seq.tokens) - seq.num_computed - 1 for seq in scheduler._sequences.running)
    for step in range(bound):
        if any(output.request_id == "mine" and output.token_ids for output in run_step(scheduler, runner)):
            return
        if num_tenants == 2 and length + under_way <= step_tokens:
            assert shares.num_claims > before + 1, "nobody else claimed in this step"
        flood(warm_up + step)
    raise AssertionError(f"no token after {bound} steps")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 100_000), max_num_seqs=st.integers(2, 6), num_tenants=st.integers(2, 4))
def test_where_only_slots_lack_there_are_no_more_preemptions_than_sequences(
    seed: int, max_num_seqs: int, num_tenants: int
) -> None:
    rng = random.Random(seed)
    scheduler = fair(num_blocks=400, max_num_seqs=max_num_seqs, budget=max_num_seqs + 12)
    runner, num_sequences = FakeRunner(400, 4), 0
    for step in range(120):
        for _ in range(rng.choice([0, 1, 2])):
            request = random_request(rng, f"r{step}.{rng.random()}", f"t{rng.randrange(num_tenants)}")
            scheduler.add_request(request)
            num_sequences += request.params.n
        run_step(scheduler, runner)
        assert scheduler.num_preemptions <= num_sequences


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 100_000),
    warm_up=st.integers(0, 30),
    max_num_seqs=st.integers(1, 6),
    num_blocks=st.integers(8, 14),
    caching=st.booleans(),
)
def test_a_request_that_needs_the_whole_pool_ends_though_others_claim_their_shares_in_every_step(
    seed: int, warm_up: int, max_num_seqs: int, num_blocks: int, caching: bool
) -> None:
    rng = random.Random(seed)
    scheduler = fair(num_blocks, max_num_seqs, max_num_seqs + rng.randint(0, 6), caching=caching)
    runner, tenants = FakeRunner(num_blocks, 4), ["a", "b", "c"]

    def small(step: int) -> None:
        for tenant in tenants:
            scheduler.add_request(random_request(rng, f"{tenant}{step}", tenant))

    for step in range(warm_up):
        small(step)
        run_step(scheduler, runner)
    longest = 4 * num_blocks
    giant = make_request("giant", [9] * (longest - 6), 6, stop_token_ids=NEVER, tenant="giant")
    scheduler.add_request(giant)
    bound = (scheduler.num_running + len(tenants) + 1) * (longest + 2 * max_num_seqs * longest)
    for step in range(bound):
        small(warm_up + step)
        if any(o.request_id == "giant" and o.finish_reason is not None for o in run_step(scheduler, runner)):
            return
    raise AssertionError(f"not at its end after {bound} steps")
