"""Drafts in the scheduler: the answers stay, and as many are computed as pay."""

import logging
from array import array
from collections.abc import Sequence as Tokens

import pytest

from penstock.api.request import FinishReason
from penstock.core.block_keys import block_keys
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence
from penstock.core.speculation import MAX_PAUSE, Draft, Speculation
from tests.core.drafters import SkilledDrafter, TimedRunner
from tests.core.fakes import (
    STOP_TOKEN,
    FakeRunner,
    expected_answer,
    make_request,
    make_scheduler,
    run_step,
    run_to_end,
)

NUM_DRAFTS = 8


class Setting:
    """A scheduler with a drafter of some skill, on a machine where a token more takes `token` of a step's time."""

    def __init__(self, skill: float, token: float = 0.03, **limits: int) -> None:
        limits = {"num_blocks": 400, "budget": 64, "max_num_seqs": 8} | limits
        self.fake = FakeRunner(limits["num_blocks"], 4)
        self.runner = TimedRunner(self.fake, 1.0, token)
        self.drafter = SkilledDrafter(self.fake, skill)
        self.speculation = Speculation([self.drafter], NUM_DRAFTS, self.runner.clock)
        self.scheduler = make_scheduler(**limits, speculation=self.speculation)

    def add(self, name: str, prompt: Tokens[int], max_tokens: int, **more: object) -> None:
        self.scheduler.add_request(make_request(name, prompt, max_tokens, **({"stop_token_ids": ()} | more)))

    def run(self) -> int:
        """How many steps it takes to the end."""
        steps = 0
        while self.scheduler.has_work:
            run_step(self.scheduler, self.runner)
            steps += 1
        return steps


def test_right_guesses_save_steps() -> None:
    setting = Setting(skill=1.0)
    setting.add("a", [1, 2, 3], 200)
    assert setting.run() < 40
    assert setting.scheduler.num_accepted == setting.scheduler.num_drafted > 160


def test_the_first_draft_of_all_is_one_token() -> None:
    """As a long one that is wrong teaches no more."""
    setting = Setting(skill=0.0)
    setting.add("a", [1, 2, 3], 40)
    drafted = []
    while setting.scheduler.has_work:
        run_step(setting.scheduler, setting.runner)
        drafted.append(setting.scheduler.trace.num_drafted)
    assert [count for count in drafted if count][:1] == [1]
    assert setting.scheduler.num_drafted < 5


@pytest.mark.parametrize(("skill", "least", "most"), [(0.0, 1.0, 1.03), (0.3, 0.7, 0.9), (0.9, 0.15, 0.3)])
def test_it_pays_or_costs_next_to_nothing(skill: float, least: float, most: float) -> None:
    setting = Setting(skill)
    setting.add("a", [1, 2, 3], 400)
    setting.run()
    without = 1.03 * 399 + 1.09
    assert least < setting.runner.now / without < most


def test_where_a_token_more_costs_as_much_as_a_step_nothing_is_drafted() -> None:
    setting = Setting(skill=0.9, token=1.0)
    setting.runner.fixed = 0.0
    setting.add("a", [1, 2, 3], 500)
    setting.run()
    assert setting.scheduler.num_drafted < 40


def test_what_stops_to_pay_is_stopped_and_what_begins_to_pay_is_noticed() -> None:
    setting = Setting(skill=0.99)
    setting.add("a", [1, 2, 3], 1000)
    drafted = []
    for skill in (0.99, 0.0, 0.99):
        setting.drafter.skill = skill
        before = setting.scheduler.num_drafted
        for _ in range(30):
            run_step(setting.scheduler, setting.runner)
        drafted.append(setting.scheduler.num_drafted - before)
    assert drafted[0] > 150
    assert drafted[1] < 80
    assert drafted[2] > 150


def test_a_stop_token_inside_a_draft_ends_the_answer_there() -> None:
    setting = Setting(skill=1.0)
    for number in range(20):
        setting.add(f"r{number}", [number, 1], 60, stop_token_ids=(STOP_TOKEN,), min_tokens=3)
    collected = run_to_end(setting.scheduler, setting.runner)
    for number in range(20):
        request = make_request(f"r{number}", [number, 1], 60, min_tokens=3)
        answer = collected.tokens[request.request_id, 0], collected.endings[request.request_id, 0][0]
        assert answer == expected_answer(setting.fake, request, 0)
    assert any(ending == [FinishReason.STOP] for ending in collected.endings.values())


def test_decodes_and_prompts_come_before_drafts() -> None:
    setting = Setting(skill=1.0, budget=12, max_num_seqs=4)
    for number in range(3):
        setting.add(f"r{number}", [number], 60)
    for _ in range(3):
        run_step(setting.scheduler, setting.runner)
    setting.add("prompt", range(40), 4)
    plan = setting.scheduler.schedule()
    assert plan is not None
    assert sorted(plan.forward.query_lens) == [1, 1, 1, 9], "no token is left for drafts"
    setting.scheduler.update(setting.runner.execute(plan))


def test_a_step_has_no_more_samples_than_the_workspace_is_planned_for() -> None:
    setting = Setting(skill=1.0, budget=300, max_num_seqs=4)
    for number in range(4):
        setting.add(f"r{number}", [number], 60)
    most = 0
    while (plan := setting.scheduler.schedule()) is not None:
        most = max(most, len(plan.samples))
        setting.scheduler.update(setting.runner.execute(plan))
    assert most == 4 + NUM_DRAFTS


def test_rejected_tokens_blocks_are_free_after_the_step_and_never_cached() -> None:
    setting = Setting(skill=0.5, token=0.001)
    setting.add("a", [1, 2, 3, 4], 60)
    while setting.scheduler.has_work:
        run_step(setting.scheduler, setting.runner)
        for seq in setting.scheduler._sequences.of("a"):
            assert len(seq.tables[0].blocks) == setting.scheduler.kv.blocks_for(max(seq.num_computed, 1))
    answer, _ = expected_answer(setting.fake, make_request("a", [1, 2, 3, 4], 60, stop_token_ids=()), 0)
    text = array("i", [1, 2, 3, 4, *answer])
    path = setting.scheduler.kv.cache.match("", block_keys(text, (), 4, 16))
    assert len(path) == 15 == len(setting.scheduler.kv.cache), "all that was computed and right, and nothing else"
    assert setting.scheduler.num_accepted < setting.scheduler.num_drafted


def test_where_blocks_are_short_drafts_are_cut_and_nobody_is_preempted_for_them() -> None:
    setting = Setting(skill=1.0, num_blocks=8, max_num_seqs=2)
    setting.add("a", [1], 14)
    setting.add("b", [2], 14)
    collected = run_to_end(setting.scheduler, setting.runner)
    assert setting.scheduler.num_preemptions == 0
    assert {len(tokens) for tokens in collected.tokens.values()} == {14}


@pytest.mark.parametrize("when", [0, 3])
def test_a_drafter_that_fails_is_not_asked_again_and_nobody_notices(
    when: int, caplog: pytest.LogCaptureFixture
) -> None:
    setting = Setting(skill=1.0)

    class Failing(SkilledDrafter):
        def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
            if len(self.asked) >= when:
                raise RuntimeError("no more ideas")
            return super().propose(wanted)

    scheduler = make_scheduler(
        num_blocks=50, speculation=Speculation([Failing(setting.fake, 1.0)], NUM_DRAFTS, setting.runner.clock)
    )
    request = make_request("a", [1], 50, stop_token_ids=())
    scheduler.add_request(request)
    with caplog.at_level(logging.ERROR):
        collected = run_to_end(scheduler, setting.runner)
    assert collected.tokens["a", 0] == expected_answer(setting.fake, request, 0)[0]
    assert len(caplog.records) == 1
    assert "the engine goes on without it" in caplog.text


def test_whoever_has_ended_is_forgotten() -> None:
    setting = Setting(skill=1.0)
    setting.add("a", [1], 20, n=2)
    setting.add("b", [2], 20)
    run_step(setting.scheduler, setting.runner)
    setting.scheduler.finish_request("b", None, FinishReason.ABORT)
    setting.run()
    assert sorted(setting.drafter.forgotten) == ["a", "a", "b"]
    assert not setting.speculation._acceptance


def with_slow_drafter(setting: Setting, skill: float, seconds: float) -> tuple[Scheduler, SkilledDrafter]:
    """A scheduler whose drafter takes so long each time that it is asked."""

    class Slow(SkilledDrafter):
        def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
            setting.runner.now += seconds
            return super().propose(wanted)

    slow = Slow(setting.fake, skill)
    speculation = Speculation([slow], NUM_DRAFTS, setting.runner.clock)
    return make_scheduler(num_blocks=600, speculation=speculation), slow


def test_where_nothing_comes_of_asking_it_takes_a_small_share_of_the_time() -> None:
    setting = Setting(skill=0.0, num_blocks=600)
    scheduler, slow = with_slow_drafter(setting, skill=0.0, seconds=0.05)
    scheduler.add_request(make_request("a", [1], 400, stop_token_ids=()))
    run_to_end(scheduler, setting.runner)
    assert 400 / (MAX_PAUSE + 1) < len(slow.asked) < 400 / 8


def test_where_guesses_pay_they_are_made_in_all_steps() -> None:
    setting = Setting(skill=1.0, num_blocks=600)
    scheduler, slow = with_slow_drafter(setting, skill=1.0, seconds=0.05)
    scheduler.add_request(make_request("a", [1], 2000, stop_token_ids=()))
    steps = 0
    while scheduler.has_work:
        run_step(scheduler, setting.runner)
        steps += 1
    assert steps - len(slow.asked) < 5
    assert 2000 / (NUM_DRAFTS + 1) < steps < 2000 / (NUM_DRAFTS + 1) + 10


def test_the_one_that_costs_is_asked_where_the_free_one_has_no_idea_and_only_where_it_pays() -> None:
    setting = Setting(skill=0.9)

    class Idle(SkilledDrafter):
        def _count(self, limit: int) -> int:
            return 0

    class Costly(SkilledDrafter):
        seconds = 0.01

        @property
        def free(self) -> bool:
            return False

        def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
            setting.runner.now += self.seconds * sum(limit for _, limit in wanted)
            return super().propose(wanted)

    idle, costly = Idle(setting.fake, 0.9), Costly(setting.fake, 0.9)
    speculation = Speculation([costly, idle], NUM_DRAFTS, setting.runner.clock)
    scheduler = make_scheduler(num_blocks=600, speculation=speculation)
    scheduler.add_request(make_request("a", [1], 2000, stop_token_ids=()))
    for _ in range(60):
        run_step(scheduler, setting.runner)
    assert len(idle.asked) == len(costly.asked) > 50
    costly.seconds = 1.0  # as a step itself
    for _ in range(30):
        run_step(scheduler, setting.runner)
    asked = len(costly.asked)
    for _ in range(60):
        run_step(scheduler, setting.runner)
    assert len(costly.asked) - asked < 6
