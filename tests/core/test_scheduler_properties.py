"""Random traffic through the real scheduler and a checking runner: what must hold whatever comes."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.request import FinishReason, Request
from penstock.api.sampling_params import Beams
from penstock.config.footprint import PoolLimits
from penstock.config.memory import layer_groups
from penstock.config.model_facts import KVSpec
from penstock.core.kv_manager import CacheGroup
from penstock.core.policies import TgiAdmission
from penstock.core.scheduler import Scheduler
from penstock.core.speculation import Speculation
from tests.core.drafters import UnsteadyClock, WhimsicalDrafter
from tests.core.fakes import (
    Collected,
    FakeRunner,
    digest,
    expected_answer,
    expected_beams,
    make_request,
    make_scheduler,
    run_step,
)

MAX_LEN = 24


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often share beginnings."""
    shared = draw(st.sampled_from([[], [1] * 4, [1, 2, 3, 4, 5, 6, 8, 9], [1] * 4 + [2] * 5]))
    return shared + draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))


@st.composite
def requests(draw: st.DrawFn) -> dict:
    prompt = draw(prompts())
    n = draw(st.sampled_from([1, 1, 1, 2, 3, 9]))  # nine are more than may run
    num_beams = draw(st.sampled_from([0, 0, 0, 2, 3]))
    penalty, early = draw(st.sampled_from([1.0, 0.0, -1.0, 2.0])), draw(st.sampled_from([False, True, "never"]))
    return {
        "prompt": prompt,
        "max_tokens": draw(st.integers(0, min(8, MAX_LEN - len(prompt)))),
        "n": n,
        "beams": Beams(num_beams, penalty, early) if num_beams >= n > 0 and num_beams else None,
        "prompt_logprobs": draw(st.sampled_from([None, None, 0, 2])),
        "min_tokens": draw(st.sampled_from([0, 0, 2])),
        "priority": draw(st.integers(0, 2)),
        "namespace": draw(st.sampled_from(["", "", "other"])),
        "tenant": draw(st.sampled_from(["", "", "a", "b"])),
    }


EVENTS = st.lists(
    st.one_of(
        requests(),
        st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from([None, 0, 1, 2, 8])),
        st.integers(1, 6),  # so many steps
        st.just("killed"),  # the engine; a fresh one takes over
    ),
    min_size=1,
    max_size=40,
)


def cost(request: Request) -> int:
    return len(request.prompt_token_ids) + request.params.max_tokens


def most_steps(request: Request) -> int:
    """A beam may have to be computed anew for each token."""
    params = request.params
    return params.num_sequences * (cost(request) + 8 * MAX_LEN) * (1 if params.beams is None else params.max_tokens + 1)


class Traffic:
    """Plays events against a scheduler; every answer is compared with the one a request gets alone."""

    def __init__(self, make: Callable[[], Scheduler], runner: FakeRunner, budget: int) -> None:
        self.make, self.scheduler, self.runner, self.budget = make, make(), runner, budget
        self.collected = Collected()
        self.requests: dict[str, Request] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.steps = 0
        self.ended_at: dict[str, int] = {}
        self.started_at: dict[str, int] = {}

    def play(self, events: list) -> None:
        for event in events:
            self.play_one(event)
            self.scheduler.check_integrity()
        bound = sum(most_steps(request) for request in self.requests.values()) + 1
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "a request never ends"

    def play_one(self, event: Any) -> None:
        if isinstance(event, dict):
            self.add(event)
        elif isinstance(event, int):
            for _ in range(event):
                self.step()
        elif event == "killed":
            self.hand_over()
        else:
            self.abort(f"r{event[1]}", event[2])

    def add(self, event: dict) -> None:
        request = make_request(f"r{len(self.requests)}", **event)
        self.requests[request.request_id] = request
        self.started_at[request.request_id] = self.steps
        self.scheduler.add_request(request)

    def abort(self, request_id: str, index: int | None) -> None:
        request = self.requests.get(request_id)
        if request and request.params.beams:
            index = None  # a search ends as a whole
        for i in range(request.params.n) if request else ():
            if index in (None, i) and (request_id, i) not in self.collected.endings:
                self.aborted.add((request_id, i))
        self.scheduler.finish_request(request_id, index, FinishReason.ABORT)
        self.scheduler.finish_request(request_id, index, FinishReason.ABORT)  # idempotent

    def hand_over(self) -> None:
        """A fresh engine goes on with what is unfinished. Endings that had not been told are lost with the old one."""
        self.scheduler = self.make()
        for request_id, request in self.requests.items():
            keys = [(request_id, i) for i in range(request.params.n)]
            for key in self.aborted.intersection(keys):
                self.collected.endings.setdefault(key, [FinishReason.ABORT])  # the server ends these by itself
            answers = [self.collected.tokens.setdefault(key, []) for key in keys]
            ended = [key in self.collected.endings for key in keys]
            if not all(ended):
                resumed = tuple(None if gone else tuple(a) for gone, a in zip(ended, answers, strict=True))
                self.scheduler.add_request(request, resumed if any(ended) or any(answers) else ())

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            self.collected.add(self.scheduler.drain())
            assert self.scheduler.schedule() is None, "an idle scheduler finds work"
            assert not self.scheduler.has_work, "an idle scheduler says that it has work"
            return
        self.steps += 1
        assert sum(plan.forward.query_lens) + len(plan.forward.encode) > 0
        assert sum(plan.forward.query_lens) <= self.budget
        self.collected.add(self.scheduler.update(self.runner.execute(plan)))
        self.scheduler.check_integrity()
        for request_id, _ in self.collected.endings:
            self.ended_at.setdefault(request_id, self.steps)

    def check(self) -> None:
        for request_id, request in self.requests.items():
            beams = expected_beams(self.runner, request) if request.params.beams and request.params.max_tokens else None
            self.check_prompt(request)
            for index in range(request.params.n):
                key = (request_id, index)
                assert len(self.collected.endings[key]) == 1, f"{key} must end exactly once"
                answer, reason = expected_answer(self.runner, request, index)
                if beams is not None:
                    answer, score, reason = beams[index]
                    assert key in self.aborted or self.collected.scores[key] == pytest.approx(score, abs=1e-9)
                if key in self.aborted and self.collected.endings[key] != [reason]:
                    assert self.collected.endings[key] == [FinishReason.ABORT]
                    assert self.collected.tokens[key] == answer[: len(self.collected.tokens[key])]
                else:
                    assert self.collected.tokens[key] == answer
                    assert self.collected.endings[key] == [reason]
        for pool in self.scheduler.kv.pools:
            assert pool.num_free + pool.num_idle == pool.num_blocks, "blocks are missing when all has ended"

    def check_prompt(self, request: Request) -> None:
        told, tokens = self.collected.prompts.get(request.request_id, {}), list(request.prompt_token_ids)
        contents = self.runner.prompt_contents(request)
        count = request.params.prompt_logprobs
        for place, entry in told.items():
            assert count is not None, "nobody asked"
            assert entry == self.runner.entry(digest(contents[:place]), tokens[place], count)
        if count is not None and not self.aborted.intersection((request.request_id, i) for i in range(128)):
            assert sorted(told) == list(range(1, len(tokens))), "something of the prompt is not told"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=EVENTS,
    num_blocks=st.integers(6, 20),
    max_num_seqs=st.integers(3, 6),
    extra_budget=st.integers(0, 10),
    caching=st.booleans(),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    tgi=st.booleans(),
    skill=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
    steady=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (None, 1), (None, 6), (7,), (9, 3), (None, 8, 2)]),
    states=st.sampled_from([None, None, (0, 1), (1, 1), (2, 2), (5, 2), (30, 1), (30, 3)]),
)
def test_every_request_ends_once_with_its_own_answer_and_blocks_are_conserved(
    events: list,
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    caching: bool,
    policy: str,
    tgi: bool,
    skill: float | None,
    steady: bool,
    windows: tuple[int | None, ...],
    states: tuple[int, int] | None,
) -> None:
    """`states`: blocks of a group of states beyond one a slot, and after how many blocks one is a checkpoint."""
    admission = TgiAdmission(
        block_size=4,
        max_batch_prefill_tokens=8,
        max_batch_total_tokens=3 * MAX_LEN,
        waiting_served_ratio=1.2,
        max_waiting_tokens=3,
    )
    budget = max_num_seqs + extra_budget

    limits = PoolLimits(MAX_LEN + 1, max_num_seqs, budget, 4)
    layers = layer_groups([KVSpec(1, 4, window) for window in windows], limits, num_blocks)
    groups = tuple(CacheGroup(group.num_blocks, group.window) for group in layers)
    if states is not None:
        groups += (CacheGroup(max_num_seqs + states[0], checkpoint_every=states[1]),)
    runner = FakeRunner(groups, 4)

    def make() -> Scheduler:
        clock = (lambda: 0.0) if steady else UnsteadyClock()
        speculation = None if skill is None else Speculation([WhimsicalDrafter(runner, skill)], 5, clock)
        return make_scheduler(
            groups=groups,
            max_num_seqs=max_num_seqs,
            budget=budget,
            caching=caching,
            policy=policy,
            admission=admission if tgi else None,
            speculation=speculation,
        )

    traffic = Traffic(make, runner, budget)
    traffic.play(events)
    traffic.check()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompt=prompts(), n=st.integers(1, 2), num_blocks=st.integers(6, 12), seed=st.integers(0, 1000))
def test_under_fcfs_no_flood_of_later_requests_pushes_a_request_past_the_stated_bound(
    prompt: list[int], n: int, num_blocks: int, seed: int
) -> None:
    rng = random.Random(seed)
    max_num_seqs = 4
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=6)
    runner = FakeRunner(num_blocks, 4)
    earlier = [make_request(f"e{i}", [rng.randrange(4) for _ in range(rng.randrange(1, 12))], 8) for i in range(4)]
    mine = make_request("mine", prompt, 5, n=n)
    for request in [*earlier, mine]:
        scheduler.add_request(request)
    bound = sum(r.params.n * (cost(r) + max_num_seqs * MAX_LEN) for r in [*earlier, mine])
    ended: set[int] = set()
    for step in range(bound):
        scheduler.add_request(make_request(f"flood{step}", [rng.randrange(4) for _ in range(rng.randrange(1, 16))], 8))
        for output in run_step(scheduler, runner):
            if output.request_id == "mine" and output.finish_reason is not None:
                ended.add(output.index)
        if len(ended) == n:
            return
    raise AssertionError(f"not at its end after {bound} steps")
