"""The scheduler by hand: each promise of its docstring on a case small enough to follow."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.api.request import FinishReason, SequenceOutput
from penstock.core.build import make_scheduler as make_scheduler_of
from penstock.core.plan import Ending, StepPlan, StepResult
from penstock.core.policies import TgiAdmission
from penstock.core.scheduler import Scheduler
from penstock.core.step import Step
from tests.core.fakes import FakeRunner, expected_answer, make_request, make_scheduler, run_step, run_to_end
from tests.support.stepping import settings_for

NEVER = ()  # no stop tokens: a sequence runs to its max_tokens


def step(scheduler: Scheduler, token: int = 1) -> tuple[StepPlan, list[SequenceOutput]]:
    """One step in which every sample is `token`."""
    plan = scheduler.schedule()
    assert plan is not None
    outputs = scheduler.update(StepResult([token] * len(plan.samples)))
    scheduler.check_integrity()
    return plan, outputs


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_sampled_once_at_its_end() -> None:
    scheduler = make_scheduler(budget=5)
    scheduler.add_request(make_request("a", range(12), max_tokens=2))
    shapes = []
    for _ in range(4):
        plan, _ = step(scheduler, token=3)
        shapes.append((plan.forward.starts, plan.forward.query_lens, len(plan.samples)))
    assert shapes == [([0], [5], 0), ([5], [5], 0), ([10], [2], 1), ([12], [1], 1)]
    assert not scheduler.has_work


def test_a_decode_never_waits_for_a_prompt_to_finish() -> None:
    scheduler = make_scheduler(budget=4, num_blocks=32)
    scheduler.add_request(make_request("talker", [1], max_tokens=10))
    step(scheduler)
    scheduler.add_request(make_request("reader", range(30), max_tokens=1))
    for _ in range(5):
        plan, outputs = step(scheduler)
        assert plan.forward.query_lens == [1, 3]
        assert [o.request_id for o in outputs] == ["talker"]


def test_generated_tokens_are_cached_too_so_the_next_turn_hits() -> None:
    scheduler = make_scheduler(num_blocks=16)
    scheduler.add_request(make_request("turn1", [1, 2, 3], max_tokens=6, stop_token_ids=NEVER))
    while scheduler.has_work:
        step(scheduler, token=9)
    scheduler.add_request(make_request("turn2", [1, 2, 3] + [9] * 6 + [5], max_tokens=1))
    plan, outputs = step(scheduler)
    assert plan.forward.starts == [8]
    assert outputs[0].num_cached_tokens == 8


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_answer_has_exactly_max_tokens_tokens(max_tokens: int) -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(16, 4)
    scheduler.add_request(make_request("a", [1, 2, 3], max_tokens, n=2, stop_token_ids=NEVER))
    collected = run_to_end(scheduler, runner)
    for index in range(2):
        assert len(collected.tokens["a", index]) == max_tokens
        assert collected.endings["a", index] == [FinishReason.LENGTH]


def test_a_stop_token_ends_a_sequence_but_not_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1], max_tokens=9, min_tokens=2, stop_token_ids=(7,)))
    assert step(scheduler, token=7)[1][0].finish_reason is None
    assert step(scheduler, token=7)[1][0].finish_reason is None
    assert step(scheduler, token=7)[1][0].finish_reason is FinishReason.STOP
    assert not scheduler.has_work


def test_siblings_share_the_prompts_blocks_and_copy_the_partly_filled_one_on_write() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add_request(make_request("a", range(6), max_tokens=4, n=3, stop_token_ids=NEVER))
    plan, outputs = step(scheduler)
    assert plan.forward.sampled_rows == [5, 5, 5]
    (first,) = plan.forward.new_blocks
    assert plan.samples.indices == [0, 1, 2]
    assert [o.index for o in outputs] == [0, 1, 2]
    assert scheduler.kv.pool.num_held == 2
    plan, _ = step(scheduler)
    assert len(plan.forward.block_copies) == 2, "the last one keeps the original"
    assert {source for _, source, _ in plan.forward.block_copies} == {first.blocks[1]}
    assert scheduler.kv.pool.num_held == 4


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("index", [None, 0, 1])
def test_an_abort_in_any_state_ends_the_request_once_and_returns_its_blocks(when: int, index: int | None) -> None:
    scheduler = make_scheduler(budget=4, num_blocks=8)
    runner = FakeRunner(8, 4)
    scheduler.add_request(make_request("other", [1, 2], max_tokens=3, stop_token_ids=NEVER))
    scheduler.add_request(make_request("a", range(9), max_tokens=3, n=2, stop_token_ids=NEVER))
    endings: list[tuple[str, int]] = []
    for number in range(40):
        if number == when:
            scheduler.finish_request("a", index, FinishReason.ABORT)
            scheduler.finish_request("a", index, FinishReason.ABORT)
            scheduler.check_integrity()
        endings += [(o.request_id, o.index) for o in run_step(scheduler, runner) if o.finish_reason]
    assert sorted(endings) == [("a", 0), ("a", 1), ("other", 0)]
    assert scheduler.kv.num_available == 8


def test_when_blocks_run_out_the_younger_one_that_loses_least_is_preempted_and_recomputes() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=3, budget=16)
    runner = FakeRunner(6, 4)
    lengths = {"old": 8, "middle": 7, "young": 3}
    requests = [make_request(name, range(length), 9, stop_token_ids=NEVER) for name, length in lengths.items()]
    for request in requests:
        scheduler.add_request(request)
    collected = run_to_end(scheduler, runner)
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert (collected.tokens[request.request_id, 0], FinishReason.LENGTH) == expected_answer(runner, request, 0)


def test_the_same_request_is_not_preempted_twice_in_a_row_while_another_can_be() -> None:
    scheduler = make_scheduler(num_blocks=9, max_num_seqs=4, budget=16, caching=False)
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, range(7), 20, stop_token_ids=NEVER))
    victims = []
    preempt = scheduler._preempt
    scheduler._preempt = lambda seq, step: (victims.append((seq.request_id, scheduler.num_running)), preempt(seq, step))
    while scheduler.has_work:
        step(scheduler)
    for (before, _), (after, num_running) in itertools.pairwise(victims):
        assert before != after or num_running <= 2, "another could have been chosen"
    assert len(victims) >= 2


def test_the_longest_request_that_the_pool_can_hold_alone_finishes_beside_others() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=4, budget=8)
    runner = FakeRunner(6, 4)
    longest = make_request("longest", range(10), 14, stop_token_ids=NEVER)
    for i in range(3):
        scheduler.add_request(make_request(f"s{i}", [i], 6, stop_token_ids=NEVER))
    scheduler.add_request(longest)
    for i in range(3, 6):
        scheduler.add_request(make_request(f"s{i}", [i], 6, stop_token_ids=NEVER))
    assert run_to_end(scheduler, runner).endings["longest", 0] == [FinishReason.LENGTH]


def test_admission_keeps_a_block_in_reserve_for_each_running_sequence() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add_request(make_request("a", range(7), 4, stop_token_ids=NEVER))
    step(scheduler)
    scheduler.add_request(make_request("b", range(20, 27), 1))  # its two blocks are free, but then none would be left
    plan, _ = step(scheduler)
    assert len(plan.forward.query_lens) == 1
    assert scheduler.num_preemptions == 0


def test_under_the_priority_policy_the_lower_number_is_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1, budget=8, policy="priority")
    for name, priority in (("late", 5), ("soon", 1), ("soon too", 1)):
        scheduler.add_request(make_request(name, [1], 1, priority=priority))
    order = [step(scheduler)[1][0].request_id for _ in range(3)]
    assert order == ["soon", "soon too", "late"]


def test_a_sample_that_is_no_number_ends_its_sequence_with_an_error_and_no_other() -> None:
    scheduler = make_scheduler()
    for name in ("bad", "good"):
        scheduler.add_request(make_request(name, [1], 2, stop_token_ids=NEVER))
    plan = scheduler.schedule()
    assert plan is not None
    bad, good = scheduler.update(StepResult([None, 4], endings={0: Ending.NOT_FINITE}))
    assert (bad.finish_reason, bad.token_ids) == (FinishReason.ERROR, [])
    assert bad.error == "the model's logits were not finite numbers"
    assert good.finish_reason is None
    step(scheduler)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"dtype": "float16", "kv_cache_dtype": "float16"}, "--dtype"),
        ({"float16_weights": True}, "--dtype"),
        ({"kv_cache_dtype": "float16"}, "--kv-cache-dtype"),
    ],
)
def test_an_answer_beyond_the_range_of_float16_ends_with_advice(
    tiny_llama: Path, changes: dict[str, Any], option: str
) -> None:
    _, settings = settings_for(tiny_llama)
    scheduler = make_scheduler_of(replace(settings, **changes))
    scheduler.add_request(make_request("bad", [1], 2, stop_token_ids=NEVER))
    assert scheduler.schedule() is not None
    (bad,) = scheduler.update(StepResult([None], endings={0: Ending.NOT_FINITE}))
    assert bad.error is not None
    assert bad.error.endswith(f"the range of float16: start with {option} bfloat16 or float32")


def test_a_failed_step_ends_its_requests_with_an_error_and_the_next_ones_go_on() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in ("a", "b", "waiting"):
        scheduler.add_request(make_request(name, [1], 1))
    assert scheduler.schedule() is not None
    outputs = scheduler.fail_step("out of memory")
    assert {o.request_id for o in outputs} == {"a", "b"}
    assert {(o.finish_reason, o.error) for o in outputs} == {(FinishReason.ERROR, "out of memory")}
    scheduler.check_integrity()
    assert step(scheduler)[1][0].request_id == "waiting"


def test_an_idle_scheduler_has_nothing_to_do() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_work
    assert scheduler.schedule() is None


def told(outputs: list[SequenceOutput]) -> list[tuple[int, list[int]]]:
    """Of what was told of prompts: the place, and the tokens."""
    parts = [output.prompt for output in outputs if output.prompt is not None]
    return [(part.start, [entry.token_id for entry in part.logprobs]) for part in parts]


def test_a_prompts_scores_come_with_its_chunks_and_all_before_the_first_token() -> None:
    scheduler, runner = make_scheduler(budget=5), FakeRunner(16, 4)
    scheduler.add_request(make_request("a", range(12), 2, n=2, prompt_logprobs=1, stop_token_ids=NEVER))
    steps = [run_step(scheduler, runner) for _ in range(3)]
    assert [told(outputs) for outputs in steps] == [
        [(1, [1, 2, 3, 4, 5])],
        [(6, [6, 7, 8, 9, 10])],
        [(11, [11])],
    ]
    assert [len(output.token_ids) for output in steps[2]] == [0, 1, 1]
    assert steps[0][0].first_scheduled is not None


def test_a_prompt_to_be_scored_takes_from_the_cache_only_what_it_has_told() -> None:
    scheduler, runner = make_scheduler(num_blocks=7, max_num_seqs=2, budget=8), FakeRunner(7, 4)
    scheduler.add_request(make_request("warm", range(12), 1))
    run_to_end(scheduler, runner)
    scheduler.add_request(make_request("a", range(12), 4, prompt_logprobs=0, stop_token_ids=NEVER))
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.forward.starts, len(plan.prompt_logprobs)) == ([0], 8), "nothing from the cache"
    scheduler.update(runner.execute(plan))
    scheduler._preempt(scheduler._sequences.running[0], Step(0, 0))
    scheduler._sequences.drop_preempted()
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.forward.starts, plan.prompt_logprobs.token_ids) == ([8], [9, 10, 11])


def test_a_prompt_that_is_only_to_be_scored_ends_when_it_is_told() -> None:
    scheduler, runner = make_scheduler(budget=5), FakeRunner(16, 4)
    scheduler.add_request(make_request("a", range(11), 0, n=2, prompt_logprobs=0))
    scheduler.add_request(make_request("one token", [3], 0, prompt_logprobs=0))
    outputs = [output for _ in range(4) for output in run_step(scheduler, runner)]
    assert told(outputs) == [(1, [1, 2, 3, 4, 5]), (6, [6, 7, 8, 9, 10])]
    endings = [(o.request_id, o.index) for o in outputs if o.finish_reason is FinishReason.LENGTH]
    assert sorted(endings) == [("a", 0), ("a", 1), ("one token", 0)]
    assert not scheduler.has_work


def test_a_prompt_logprob_that_is_no_number_ends_its_request_and_no_other() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(16, 4)
    for name in ("bad", "good"):
        scheduler.add_request(make_request(name, [1, 2, 3], 2, n=2, prompt_logprobs=0, stop_token_ids=NEVER))
    plan = scheduler.schedule()
    assert plan is not None
    result = runner.execute(plan)
    result.prompt_logprobs[1] = replace(result.prompt_logprobs[1], logprob=math.nan)
    outputs = scheduler.update(result)
    scheduler.check_integrity()
    assert [o.index for o in outputs if o.request_id == "bad" and o.finish_reason is FinishReason.ERROR] == [0, 1]
    assert not any(o.token_ids for o in outputs if o.request_id == "bad")
    assert len(run_to_end(scheduler, runner).tokens) == 2


def tgi(**controls: float | None) -> TgiAdmission:
    given = {
        "max_batch_prefill_tokens": None,
        "max_batch_total_tokens": None,
        "waiting_served_ratio": 0.0,
        "max_waiting_tokens": 20,
    }
    return TgiAdmission(block_size=4, **{**given, **controls})


def test_max_batch_prefill_tokens_rounded_up_to_blocks_bounds_the_prompt_tokens_of_a_step() -> None:
    scheduler = make_scheduler(admission=tgi(max_batch_prefill_tokens=5), budget=16)
    scheduler.add_request(make_request("a", range(6), 4, stop_token_ids=NEVER))
    scheduler.add_request(make_request("b", range(20, 26), 4, stop_token_ids=NEVER))
    assert step(scheduler)[0].forward.query_lens == [6, 2]
    assert step(scheduler)[0].forward.query_lens == [1, 4]


def test_max_batch_total_tokens_bounds_prompts_and_max_tokens_of_all_that_run() -> None:
    scheduler = make_scheduler(admission=tgi(max_batch_total_tokens=25))
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, [1, 2], 8, stop_token_ids=NEVER))
    assert len(step(scheduler)[0].forward.query_lens) == 2


def test_newcomers_wait_for_the_ratio_and_join_after_max_waiting_tokens_steps() -> None:
    scheduler = make_scheduler(admission=tgi(waiting_served_ratio=1.0, max_waiting_tokens=4), max_num_seqs=8)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, [1], 50, stop_token_ids=NEVER))
    assert len(step(scheduler)[0].forward.query_lens) == 2
    scheduler.add_request(make_request("c", [1], 50, stop_token_ids=NEVER))
    sizes = [len(step(scheduler)[0].forward.query_lens) for _ in range(4)]
    assert sizes == [2, 2, 2, 3], "one alone waits until four steps have passed since the last admission"
    for name in ("d", "e", "f"):
        scheduler.add_request(make_request(name, [1], 50, stop_token_ids=NEVER))
    assert len(step(scheduler)[0].forward.query_lens) == 6, "three for three running join at once"
