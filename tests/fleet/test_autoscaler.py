"""The number of engines follows the demand, neither hastily nor past its limits."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.autoscaler import Autoscaler, Demand, FleetScaler
from penstock.fleet.link import EngineLink
from tests.engine.rule_core import SLOW
from tests.fleet.test_fleet import slow_tokens, with_fleet
from tests.frontend.test_client import open_one, until

SLOTS = 10
UP, DOWN = 5.0, 20.0


def demand(engines: int, sequences: int, *, behind: bool = False, starting: int = 0) -> Demand:
    return Demand(engines, starting, behind, sequences, SLOTS)


def decisions(demands, least: int = 1, most: int = 4) -> list[int]:
    """What is decided, second by second."""
    autoscaler = Autoscaler(least, most, UP, DOWN)
    return [autoscaler.decide(float(second), one) for second, one in enumerate(demands)]


def test_more_are_wanted_when_what_there_is_to_do_has_not_had_room_for_a_while():
    assert decisions([demand(1, 25)] * 7) == [1] * 5 + [3] * 2
    assert decisions([demand(1, 25)] * 4 + [demand(1, 5)] + [demand(1, 25)] * 5) == [1] * 10, "it had room for a moment"
    assert decisions([demand(1, 25)] * 3 + [demand(1, 15)] * 3)[-1] == 2, "the least of what was wanted"
    assert decisions([demand(1, 250)] * 6)[-1] == 4


def test_one_more_is_wanted_when_prompts_wait_though_there_are_slots_but_not_another_while_it_starts():
    assert decisions([demand(2, 3, behind=True)] * 6)[-1] == 3
    assert decisions([demand(3, 3, behind=True, starting=1)] * 9)[-1] == 3


def test_fewer_suffice_only_after_a_long_while_and_one_at_a_time():
    assert decisions([demand(4, 5)] * 22) == [4] * 20 + [3] * 2
    assert decisions([demand(4, 5)] * 10 + [demand(4, 35)] + [demand(4, 5)] * 15) == [4] * 26


def test_what_was_given_up_is_started_again_at_once():
    assert decisions([demand(1, 0)], least=2) == [2]


@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.integers(1, 9)), min_size=1, max_size=60),
)
def test_it_stays_within_its_limits_and_acts_only_on_what_held_for_the_whole_delay(least, range_, history):
    most, engines, now, wishes = least + range_, least, 0.0, []
    autoscaler = Autoscaler(least, most, UP, DOWN)
    for sequences, behind, seconds in history:
        now += seconds
        one = demand(engines, sequences, behind=behind)
        wishes.append((now, one.num_wanted))
        decided = autoscaler.decide(now, one)
        assert least <= decided <= most
        if decided > engines:
            assert now - wishes[0][0] >= UP
            assert all(wanted >= decided for at, wanted in wishes if at >= now - UP)
        if decided < engines:
            assert decided == engines - 1
            assert now - wishes[0][0] >= DOWN
            assert all(wanted <= decided for at, wanted in wishes if at >= now - DOWN)
        engines = decided


@given(st.integers(0, 60))
def test_a_demand_that_stays_is_met_and_then_nothing_changes(sequences):
    autoscaler, engines = Autoscaler(1, 6, UP, DOWN), 3
    for second in range(200):
        engines = autoscaler.decide(float(second), demand(engines, sequences))
        assert second < 150 or engines == min(6, max(1, -(-sequences // SLOTS)))


@pytest.mark.parametrize("fails", [False, True])
def test_a_fleet_grows_under_load_and_shrinks_after_it_without_losing_a_stream(tmp_path, fails):
    async def talk(engine):
        scaler = FleetScaler(engine.fleet, Autoscaler(1, 2, 0.0, 0.0))
        scaler.check(1.0)
        assert len(engine.fleet.replicas) == 1
        streams = [open_one(engine, 10 if i else SLOW, request_id=str(i), max_tokens=60) for i in range(80)]
        assert scaler.demand().num_wanted == 2
        if fails:
            (tmp_path / "out-of-order").touch()
        scaler.check(2.0)
        assert scaler.demand().num_starting == 1
        scaler.check(3.0)
        assert scaler.demand().num_engines == 2, "it waits for the one that starts"
        await until(lambda: not scaler.demand().num_starting)
        assert len(engine.fleet.replicas) == 2 - fails
        if fails:
            scaler.check(3.5)
            assert scaler.demand().num_starting == 0, "it is tried again after a pause"
        else:
            late = open_one(engine, SLOW, request_id="late", max_tokens=3)
            assert [output.token_ids for output in (await late.results())[0].outputs] == [slow_tokens(3)]
        for i, one in enumerate(streams):
            expected = list(range(11, 71)) if i else slow_tokens(60)
            assert [answer.token_ids for answer in (await one.results())[0].outputs] == [expected]
        scaler.check(4.0)
        await until(lambda: len(engine.fleet.replicas) == 1)
        scaler.check(5.0)
        await asyncio.sleep(0)
        assert len(engine.fleet.replicas) == 1

    with_fleet(talk, tmp_path, kinds=(EngineLink,))
