"""Whole simulations: every request ends once, the same seed gives the same times, and failures lose nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.request import Request
from penstock.api.sampling_params import ResolvedParams
from penstock.core.build import make_scheduler
from penstock.core.plan import StepResult
from penstock.errors import ConfigError
from penstock.frontend.limits import QueueLimits
from penstock.simulator.chats import Chats
from penstock.simulator.costs import StepShape, shape_of
from penstock.simulator.simulation import NO_IMAGE, TOO_LONG, Failure, Fleet, Outcome, Simulation
from penstock.simulator.workload import Arrival, make_tokens
from tests.core.images import make_image, make_images, make_tower
from tests.simulator.fleets import COSTS, make_fleet, make_settings


@dataclass(frozen=True)
class Requests:
    """Requests of (time, prompt tokens, answer tokens), each of its own text."""

    requests: tuple[tuple[float, int, int], ...]

    def arrivals(self) -> Iterator[Arrival]:
        for number, (time, prompt, answer) in enumerate(sorted(self.requests)):
            yield Arrival(time, str(number), make_tokens(2 * number, prompt), make_tokens(2 * number + 1, answer))

    def describe(self) -> str:
        return f"{len(self.requests)} requests"


def simulate(fleet: Fleet, *requests: tuple[float, int, int]) -> Outcome:
    return Simulation(fleet, Requests(requests)).run()


def test_one_request_takes_the_time_of_its_steps() -> None:
    outcome = simulate(make_fleet(), (3.0, 300, 5))
    scheduler = make_scheduler(make_settings())
    params = ResolvedParams(1, 0.0, 0, 1.0, 0.0, 0, 5, 0, (), None)
    scheduler.add_request(Request("0", tuple(make_tokens(0, 300)), params, 0.0))
    seconds = []
    while (plan := scheduler.schedule()) is not None:
        seconds.append(COSTS.seconds(shape_of(plan)))
        scheduler.update(StepResult([9] * len(plan.samples)))
    assert len(seconds) == 2 + 4  # a prompt of two chunks
    assert outcome.first_tokens.tolist() == pytest.approx([sum(seconds[:2])])
    assert outcome.ends.tolist() == pytest.approx([sum(seconds)])
    assert outcome.latencies.mean == pytest.approx(sum(seconds[2:]) / 4)
    assert outcome.engines[0].steps == 6
    assert outcome.engines[0].seconds == pytest.approx(sum(seconds))
    assert outcome.seconds == pytest.approx(3.0 + sum(seconds))


def test_an_image_takes_the_time_of_its_layers_once() -> None:
    @dataclass(frozen=True)
    class Turns(Requests):
        def arrivals(self) -> Iterator[Arrival]:
            image = replace(make_image(1, 3, 4), start=2)
            for turn in range(2):
                yield Arrival(turn * 100.0, str(turn), make_tokens(1, 40), make_tokens(2, 3), images=(image,))
            yield Arrival(200.0, "large", make_tokens(1, 40), make_tokens(2, 3), images=(make_image(1, 4, 4),))

    images = make_images(make_tower(layer_elements=400))
    fleet = make_fleet()
    seen = replace(fleet, settings=replace(fleet.settings, images=images))
    outcome = Simulation(seen, Turns(())).run()
    first, second = outcome.first_tokens.tolist()
    cost = 3 * images.layer_tokens(make_image(1, 3, 4))
    assert first > COSTS.seconds(StepShape(cost + 40, 1, 40, 820)) > 3 * second
    assert outcome.refused == {NO_IMAGE: 1}
    assert Simulation(fleet, Turns(())).run().refused == {NO_IMAGE: 3}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    num_engines=st.integers(1, 4),
    num_blocks=st.sampled_from([80, 600]),
    router=st.sampled_from(["prefix", "round-robin", "least-loaded"]),
    tenants=st.sampled_from([1, 3]),
    max_queued=st.sampled_from([0, 4, 500]),
    failures=st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 3)), max_size=3),
)
def test_every_request_ends_once_and_the_same_seed_gives_the_same_times(
    seed: int,
    num_engines: int,
    num_blocks: int,
    router: str,
    tenants: int,
    max_queued: int,
    failures: list[tuple[float, int]],
) -> None:
    fleet = make_fleet(
        num_engines,
        settings=make_settings(num_blocks=num_blocks, max_num_seqs=4, max_model_len=num_blocks * 32),
        router=router,
        limits=QueueLimits(max_queued=max_queued),
        failures=tuple(Failure(time, replica) for time, replica in failures if replica < num_engines),
        restart_seconds=1.5,
    )
    chats = Chats(
        chats_per_second=5,
        seconds=8,
        turns=1,
        system_prompts=2,
        system_tokens=40,
        question_tokens=40,
        answer_tokens=30,
        tenants=tenants,
        max_context=num_blocks * 16,
        seed=seed,
    )
    first, second = (Simulation(fleet, chats).run() for _ in range(2))
    asked = list(chats.arrivals())
    assert len(first.ends) + sum(first.refused.values()) == len(asked)
    if not first.refused:
        assert first.answer_tokens == sum(len(arrival.answer) for arrival in asked)
        assert first.prompt_tokens == sum(len(arrival.prompt) for arrival in asked)
        assert first.latencies.count == first.answer_tokens - len(asked)
    assert (first.ends, first.first_tokens, first.refused) == (second.ends, second.first_tokens, second.refused)
    assert all(0 < start <= end for start, end in zip(first.first_tokens, first.ends, strict=True))
    assert 0 <= first.cached_tokens <= first.prompt_tokens or first.refused


def test_equal_beginnings_are_found_in_the_cache_as_by_the_scheduler() -> None:
    chats = Chats(
        chats_per_second=0.2, seconds=60, burstiness=0, turns=1, system_prompts=1, system_tokens=320, spread=0.0
    )
    outcome = Simulation(make_fleet(), chats).run()
    assert outcome.cached_tokens == 320 * (len(outcome.ends) - 1)


def test_a_dead_engines_requests_go_on_elsewhere_from_where_they_were() -> None:
    requests = [(0.01 * number, 64, 400) for number in range(4)]
    calm = simulate(make_fleet(2), *requests)
    struck = simulate(make_fleet(2, failures=(Failure(1.0, 0),), restart_seconds=60.0), *requests)
    assert len(struck.ends) == 4
    assert struck.moved == 2
    assert struck.latencies.count == calm.latencies.count  # no token is computed twice, or lost
    assert struck.engines[0].steps < calm.engines[0].steps
    assert max(struck.ends) < 1.5 * max(calm.ends)


def test_without_another_engine_they_wait_for_the_successor() -> None:
    calm = simulate(make_fleet(), (0.0, 64, 100))
    struck = simulate(make_fleet(failures=(Failure(0.3, 0),), restart_seconds=7.0), (0.0, 64, 100))
    assert struck.ends[0] == pytest.approx(calm.ends[0] + 7.0, abs=0.1)
    assert struck.latencies.quantile(1.0) > 7.0
    assert struck.latencies.count == 99


def test_what_the_limits_refuse_is_told_by_reason() -> None:
    fleet = make_fleet(settings=make_settings(max_num_seqs=1), limits=QueueLimits(max_queued=1, queue_timeout=1.0))
    outcome = simulate(fleet, (0.0, 16, 400), (0.1, 16, 50), (0.2, 16, 50), (0.3, 8000, 400))
    assert len(outcome.ends) == 1
    assert dict(outcome.refused) == {"waited too long": 1, "the queue is full": 1, TOO_LONG: 1}


def test_the_prefix_router_finds_more_than_round_robin() -> None:
    chats = Chats(chats_per_second=1, seconds=60, system_prompts=12, system_tokens=400, turns=4)
    hits = {}
    for router in ("prefix", "round-robin"):
        fleet = make_fleet(4, settings=make_settings(num_blocks=300), router=router)
        hits[router] = Simulation(fleet, chats).run().cached_tokens
    assert hits["prefix"] > 1.3 * hits["round-robin"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_engines": 0}, "engines"),
        ({"router": "nearest"}, "router"),
        ({"failures": (Failure(1.0, 1),)}, "no engine 1"),
    ],
)
def test_impossible_fleets_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_fleet(**changes)  # type: ignore[arg-type]
