"""The replica that a queued request goes to: room, tenants, prompts that are cached, roles."""

from dataclasses import replace

import pytest

from penstock.api.request import BlockSource
from penstock.fleet.router import ROUTERS
from tests.core.fakes import make_request
from tests.fleet.fleets import DECODE, PREFILL, ROOM, add, dispatcher, due, token


def test_a_single_replica_gets_everything_at_once():
    fleet = dispatcher(ROOM)
    add(fleet, *"abcdefgh", length=50)
    assert due(fleet) == [(0, name) for name in "abcdefgh"]
    assert not fleet.has_waiting


def test_several_replicas_get_no_more_than_their_engines_can_begin_with():
    fleet = dispatcher(ROOM, ROOM)
    add(fleet, *"abcdefgh", length=6)
    assert due(fleet) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]  # all slots
    fleet.remove_request("b")
    assert due(fleet) == [(1, "e")]
    assert fleet.num_queued == 3


def test_prompts_are_handed_over_a_few_steps_ahead():
    roomy = replace(ROOM, max_num_seqs=100)
    fleet = dispatcher(roomy, roomy)
    add(fleet, *map(str, range(20)), length=8)
    assert len(due(fleet)) == 4  # two steps of eight tokens each
    assert fleet.record_output(0, token("0"), 1)
    assert due(fleet) == [(0, "4")]


def test_a_tenant_or_a_priority_does_not_wait_behind_prompts_that_it_would_overtake_in_the_engine():
    roomy = replace(ROOM, max_num_seqs=100)
    fleet = dispatcher(roomy, roomy)
    add(fleet, "long 0", "long 1", "long 2", length=90, tenant="big", max_tokens=1)
    assert len(due(fleet)) == 2
    add(fleet, "small", tenant="small")
    add(fleet, "urgent", tenant="big", priority=-1)
    assert {name for _, name in due(fleet)} == {"small", "urgent"}


def test_a_request_waits_for_the_replica_that_has_its_prompt_rather_than_being_computed_elsewhere():
    fleet = dispatcher(*[replace(ROOM, max_num_seqs=2, max_num_batched_tokens=100)] * 2, router="prefix")
    add(fleet, "a", length=80)
    ((home, _),) = due(fleet)
    assert fleet.record_output(home, token("a"), 1)
    for name in ("other 0", "other 1"):  # keep the other engine more than half busy
        fleet.add_request(make_request(name, [9] * 80))
        assert due(fleet) == [(1 - home, name)]
        assert fleet.record_output(1 - home, token(name), 1)
    add(fleet, "b", "c", length=80)
    assert due(fleet) == [(home, "b")]
    fleet.remove_request("other 0")
    assert due(fleet) == [(1 - home, "c")], "an engine that is half idle takes what others have no slots for"
    add(fleet, "d", length=80)
    fleet.remove_request("a")
    assert due(fleet) == [(home, "d")]


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_serves_all_requests_and_leaves_no_load(router):
    fleet = dispatcher(ROOM, ROOM, ROOM, router=router)
    add(fleet, *map(str, range(30)), length=5)
    done = []
    while fleet.has_waiting:
        for replica, name in due(fleet):
            assert fleet.record_output(replica, token(name), 1)
            fleet.remove_request(name, [[1]])
            done.append(name)
    assert sorted(done, key=int) == [str(i) for i in range(30)]
    assert all(fleet.load_of(replica).num_open == fleet.load_of(replica).pending == 0 for replica in range(3))


def test_a_long_prompt_is_computed_by_a_prefill_engine_and_goes_on_at_another_one():
    fleet = dispatcher(PREFILL, DECODE, router="prefix")
    add(fleet, "long", length=200)
    add(fleet, "short", length=20)
    assert due(fleet) == [(0, "long"), (1, "short")]
    assert fleet.take_leaving(0) == []
    fleet.record_output(0, token("long"), 1)
    assert fleet.take_leaving(0) == ["long"]
    fleet.record_output(0, token("long"), 2)
    assert fleet.take_leaving(0) == [], "it is told once"
    source = BlockSource("file", "mark", ((4, 1), (5, 1)))
    assert fleet.handed_over(0, "long", source)
    assert due(fleet) == [(1, "long")]
    assert (fleet.take_source("long"), fleet.take_source("long")) == (source, None)
    assert fleet.load_of(1).pending <= 21, "nothing of it is to be computed"


def test_a_prompt_that_is_cached_where_answers_are_computed_needs_no_prefill_engine():
    fleet = dispatcher(PREFILL, DECODE, router="prefix")
    add(fleet, "first", length=200)
    assert due(fleet) == [(0, "first")]
    fleet.record_output(0, token("first"), 1)
    fleet.take_leaving(0)
    fleet.handed_over(0, "first", None)
    assert due(fleet) == [(1, "first")]
    fleet.record_output(1, token("first"), 1)
    add(fleet, "again", length=210)
    assert due(fleet) == [(1, "again")]
