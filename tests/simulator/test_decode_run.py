"""Runs of decodes against the same steps made one by one: nothing may differ but how long the simulation takes."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.api.request import SequenceOutput
from penstock.frontend.limits import QueueLimits
from penstock.simulator.chats import Chats
from penstock.simulator.decode_run import DecodeRun
from penstock.simulator.engine import SimulatedEngine
from penstock.simulator.simulation import Failure, Fleet, Outcome, Simulation
from tests.simulator.fleets import make_fleet, make_settings


def simulate(fleet: Fleet, chats: Chats, *, runs: bool) -> Outcome:
    simulation = Simulation(fleet, chats, runs=runs)
    outcome = simulation.run()
    for engine in simulation._engines:
        if engine.is_up:
            engine.scheduler.check_integrity()
    return outcome


def assert_equal(fast: Outcome, slow: Outcome) -> None:
    assert fast.refused == slow.refused
    assert fast.first_tokens.tolist() == pytest.approx(slow.first_tokens.tolist(), abs=1e-7)
    assert fast.ends.tolist() == pytest.approx(slow.ends.tolist(), abs=1e-7)
    assert (fast.cached_tokens, fast.answer_tokens, fast.moved) == (slow.cached_tokens, slow.answer_tokens, slow.moved)
    assert fast.latencies.count == slow.latencies.count
    assert fast.latencies.mean == pytest.approx(slow.latencies.mean, rel=1e-6, nan_ok=True)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert fast.latencies.quantile(share) == pytest.approx(slow.latencies.quantile(share), rel=2e-3, nan_ok=True)
    for ours, theirs in zip(fast.engines, slow.engines, strict=True):
        assert (ours.steps, ours.tokens, ours.preemptions) == (theirs.steps, theirs.tokens, theirs.preemptions)
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-6)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    num_engines=st.integers(1, 3),
    num_blocks=st.sampled_from([60, 90, 400]),
    block_size=st.sampled_from([8, 32]),
    windows=st.sampled_from([(), (40,)]),
    checkpoint_every=st.sampled_from([None, None, 3]),
    max_num_seqs=st.sampled_from([2, 6, 16]),
    policy=st.sampled_from(["fair", "fcfs", "priority"]),
    router=st.sampled_from(["prefix", "least-loaded"]),
    tenants=st.sampled_from([1, 3]),
    rate=st.sampled_from([1.0, 4.0]),
    caching=st.booleans(),
    failures=st.lists(st.tuples(st.floats(0.0, 12.0), st.integers(0, 2)), max_size=2),
)
@example(  # an engine dies in a run, in which a request got its second token
    seed=30020,
    num_engines=1,
    num_blocks=60,
    block_size=32,
    windows=(),
    checkpoint_every=None,
    max_num_seqs=6,
    policy="fair",
    router="prefix",
    tenants=1,
    rate=4.0,
    caching=False,
    failures=[(2.9375, 0)],
)
@example(  # a request waits until one of those that moved to its engine has its first token there
    seed=859708,
    num_engines=2,
    num_blocks=90,
    block_size=32,
    windows=(),
    checkpoint_every=None,
    max_num_seqs=16,
    policy="fair",
    router="least-loaded",
    tenants=1,
    rate=4.0,
    caching=True,
    failures=[(6.6100229078065915, 0)],
)
def test_runs_change_no_answer_no_time_and_no_count(
    seed: int,
    num_engines: int,
    num_blocks: int,
    block_size: int,
    windows: tuple[int, ...],
    checkpoint_every: int | None,
    max_num_seqs: int,
    policy: str,
    router: str,
    tenants: int,
    rate: float,
    caching: bool,
    failures: list[tuple[float, int]],
) -> None:
    chats = Chats(
        chats_per_second=rate,
        seconds=8,
        turns=2.5,
        system_prompts=2,
        system_tokens=70,
        question_tokens=30,
        answer_tokens=50,
        think_seconds=1,
        tenants=tenants,
        max_context=num_blocks * block_size // 2,
        seed=seed,
    )
    fleet = make_fleet(
        num_engines,
        settings=make_settings(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            checkpoint_every=checkpoint_every,
            max_num_seqs=max_num_seqs,
            policy=policy,
            enable_prefix_caching=caching,
            max_model_len=num_blocks * block_size,
        ),
        router=router,
        limits=QueueLimits(queue_timeout=5.0),
        failures=tuple(Failure(time, replica) for time, replica in failures if replica < num_engines),
        restart_seconds=2.0,
    )
    fast, slow = (simulate(fleet, chats, runs=runs) for runs in (True, False))
    if num_engines == 1 or tenants == 1:
        assert_equal(fast, slow)
    else:  # the fleet's queue hears of a run's tokens when it is over, and may order tenants differently
        assert sum(fast.refused.values()) + len(fast.ends) > 0


class StepCounter(Simulation):
    """Counts the steps that were made one by one."""

    planned = 0

    def stepped(self, engine: SimulatedEngine, outputs: Sequence[SequenceOutput]) -> None:
        self.planned += 1
        super().stepped(engine, outputs)


def test_most_steps_of_long_answers_are_made_in_runs() -> None:
    chats = Chats(chats_per_second=0.5, seconds=30, answer_tokens=200)
    simulation = StepCounter(make_fleet(), chats)
    outcome = simulation.run()
    assert outcome.num_steps > 10 * simulation.planned


def test_a_run_knows_which_step_is_under_way() -> None:
    run = DecodeRun(began=10.0, num_sequences=3, num_steps=8, first=1.0, growth=0.5)
    ends = [run.ends(steps) for steps in range(1, 9)]
    assert ends == [11.0, 12.5, 14.5, 17.0, 20.0, 23.5, 27.5, 32.0]
    for steps, end in enumerate(ends, 1):
        assert run.steps_begun(end) == steps
        assert run.steps_begun(end + 0.01) == min(steps + 1, 8)
    assert run.steps_begun(10.0) == 1
