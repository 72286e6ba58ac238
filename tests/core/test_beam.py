"""Beam search in the scheduler: the hypotheses are those of the definition, whatever room there is for the beams."""

import pytest

from penstock.api.request import FinishReason, TokenLogprob
from penstock.api.sampling_params import Beams
from penstock.core.beam import TOO_FEW, BeamSearch
from penstock.core.plan import Ending
from tests.core.fakes import FakeRunner, expected_beams, make_request, make_scheduler, run_step, run_to_end


def search_for(num_beams=2, *, n=1, penalty=1.0, early=False, max_tokens=4, **fields):
    request = make_request("r", [1], max_tokens, n=n, beams=Beams(num_beams, penalty, early), **fields)
    return BeamSearch(request.params)


def candidates(**logprobs):
    """Of tokens named t0, t1, ..."""
    top = sorted(((int(name[1:]), value) for name, value in logprobs.items()), key=lambda pair: -pair[1])
    return TokenLogprob(*top[0], tuple(top))


def finished(scheduler, runner):
    """The hypotheses of the only request, as `expected_beams` gives them."""
    outputs = []
    while scheduler.has_work:
        outputs += run_step(scheduler, runner)
    signs = [output for output in outputs if output.is_sign_of_life]
    assert len(signs) >= max(len(output.token_ids) for output in outputs) - 1, "one a token, but for the last"
    return [
        (output.token_ids, pytest.approx(output.score), output.finish_reason)
        for output in outputs
        if output not in signs
    ]


def test_the_first_continuation_of_a_parent_stays_in_its_place_and_the_others_take_those_of_losers():
    search = search_for(3)
    search.collect(0, candidates(t1=-0.1, t2=-0.2, t3=-0.3))
    assert [tuple(branch) for branch in search.advance()] == [(0, 0, 1), (1, 0, 2), (2, 0, 3)]
    search.collect(0, candidates(t1=-9.0, t2=-9.1, t3=-9.2))
    search.collect(1, candidates(t1=-1.0, t2=-1.4, t3=-9.0))
    assert not search.is_complete
    search.collect(2, candidates(t1=-1.0, t2=-9.0, t3=-9.0))
    assert search.is_complete
    assert [tuple(branch) for branch in search.advance()] == [(1, 1, 1), (2, 2, 1), (0, 1, 2)]


def test_of_equal_scores_the_better_beam_goes_first_and_then_the_lower_token():
    search = search_for(2)
    search.collect(0, candidates(t4=-1.0, t5=-1.0))
    assert [branch.token for branch in search.advance()] == [4, 5]
    search.collect(0, candidates(t4=-1.0, t5=-1.0))
    search.collect(1, candidates(t4=-1.0, t5=-1.0))
    assert [(branch.parent, branch.token) for branch in search.advance()] == [(0, 4), (0, 5)]


def test_a_stop_token_that_is_not_among_the_best_is_no_hypothesis_and_takes_no_place_from_what_goes_on():
    search = search_for(2)
    search.collect(0, candidates(t1=-0.1, t2=-0.2, t7=-0.3))
    assert [branch.token for branch in search.advance()] == [1, 2]
    search.collect(0, candidates(t7=-0.1, t3=-5.0, t4=-5.1))
    search.collect(1, candidates(t7=-0.1, t3=-6.0, t4=-6.1))
    assert search.advance() == [], "two hypotheses, and nothing that could be better"
    assert [output.token_ids for output in search.outputs("r")] == [[1, 7]]


def test_impossible_tokens_are_never_taken_and_too_few_hypotheses_are_told():
    search = search_for(2, n=2, max_tokens=1)
    search.collect(0, candidates(t1=-0.1, t2=-float("inf"), t3=-float("inf")))
    assert search.advance() == []
    first, second = search.outputs("r")
    assert first.token_ids == [1]
    assert (second.finish_reason, second.error) == (FinishReason.ERROR, TOO_FEW)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_the_hypotheses_are_those_of_the_definition(penalty, early):
    for seed in range(6):
        runner = FakeRunner(64, 4)
        scheduler = make_scheduler(num_blocks=64, max_num_seqs=4)
        beams = Beams(4, penalty, early)
        stops = (7, 8, 9)[: 1 + seed % 3]
        request = make_request("r", [seed, 2, 3], 9, n=4, beams=beams, stop_token_ids=stops, min_tokens=seed % 2)
        scheduler.add_request(request)
        assert finished(scheduler, runner) == expected_beams(runner, request)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [4, 5, 6, 9, 14])
def test_a_pool_that_holds_one_beam_is_enough(num_blocks, caching):
    runner = FakeRunner(num_blocks, 4)
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=5, caching=caching)
    request = make_request("r", range(6), 10, n=3, beams=Beams(5, 1.0, "never"), stop_token_ids=())
    scheduler.add_request(request)
    assert finished(scheduler, runner) == expected_beams(runner, request)
    assert (scheduler.num_preemptions > 0) == (num_blocks < 14)
    assert scheduler.kv.num_available == num_blocks


def test_beams_share_the_blocks_of_what_they_have_in_common():
    runner = FakeRunner(64, 4)
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=4, caching=False)
    scheduler.add_request(make_request("r", range(14), 20, beams=Beams(4, 1.0, False), stop_token_ids=()))
    run_step(scheduler, runner)
    assert scheduler.kv.pool.num_held == 4, "the prompt's blocks, once"
    assert scheduler.num_running == 4
    forward = scheduler.schedule().forward
    runner.block_tables.update(forward.new_blocks)
    shared = runner.block_tables.of(forward.slots)[0][3][3]
    assert [source for _, source, _ in forward.block_copies] == [shared] * 3, "the last one keeps it"
    assert scheduler.kv.pool.num_held == 7


def test_a_search_beside_others_finds_what_it_finds_alone_and_so_do_they():
    runner = FakeRunner(12, 4)
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=6, budget=12)
    requests = [make_request("plain", [1, 2], 12, n=2, stop_token_ids=())]
    requests += [make_request(name, [1, 2, 3, 4, len(name)], 9, beams=Beams(3, 1.0, False)) for name in ("a", "bc")]
    for request in requests:
        scheduler.add_request(request)
    collected = run_to_end(scheduler, runner)
    for request in requests[1:]:
        (answer, score, _), *_ = expected_beams(runner, request)
        assert collected.tokens[request.request_id, 0] == answer
        assert collected.scores[request.request_id, 0] == pytest.approx(score)
    assert scheduler.num_preemptions > 0
    alone = make_scheduler(num_blocks=12, max_num_seqs=6, budget=12)
    alone.add_request(requests[0])
    expected = run_to_end(alone, runner).tokens
    assert {key: collected.tokens[key] for key in expected} == expected


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("index", [None, 0, 1])
def test_a_search_ends_as_a_whole_and_returns_its_blocks(when, index):
    runner = FakeRunner(5, 4)
    scheduler = make_scheduler(num_blocks=5, max_num_seqs=4, budget=4)
    scheduler.add_request(make_request("r", range(6), 12, n=2, beams=Beams(4, 1.0, False), stop_token_ids=()))
    for _ in range(when):
        run_step(scheduler, runner)
    scheduler.finish_request("r", index, FinishReason.ABORT)
    scheduler.check_integrity()
    assert [(o.index, o.finish_reason) for o in scheduler.drain()] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    assert not scheduler.has_work
    assert scheduler.kv.num_available == 5


def test_a_beam_whose_logits_are_no_numbers_ends_the_search_and_nothing_else():
    runner = FakeRunner(16, 4)
    scheduler = make_scheduler()
    scheduler.add_request(make_request("search", [1, 2], 9, n=2, beams=Beams(2, 1.0, False), stop_token_ids=()))
    scheduler.add_request(make_request("plain", [1, 2], 9, stop_token_ids=()))
    run_step(scheduler, runner)
    plan = scheduler.schedule()
    result = runner.execute(plan)
    result.end(0, Ending.NOT_FINITE)
    outputs = scheduler.update(result)
    scheduler.check_integrity()
    failed = [(o.index, o.finish_reason) for o in outputs if o.request_id == "search"]
    assert failed == [(0, FinishReason.ERROR), (1, FinishReason.ERROR)]
    assert len(run_to_end(scheduler, runner).tokens["plain", 0]) == 7


def test_no_tokens_are_an_ending_at_once():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", [1, 2], 0, n=2, beams=Beams(2, 1.0, False)))
    assert [output.finish_reason for output in scheduler.drain()] == [FinishReason.LENGTH] * 2
    assert not scheduler.has_work
