"""A fleet's queue, step by step: its order, and what moves when replicas die, drain and go."""

from dataclasses import replace

from penstock.api.request import BlockSource
from tests.fleet.fleets import DECODE, PREFILL, ROOM, add, dispatcher, due, prove, token


def test_tenants_take_turns_and_each_goes_by_priority_and_arrival():
    one_slot = replace(ROOM, max_num_seqs=1)
    fleet = dispatcher(one_slot, one_slot)
    add(fleet, "running 0", "running 1", tenant="x")
    due(fleet)
    add(fleet, "a0", "a1", "a2", tenant="a")
    add(fleet, "a urgent", tenant="a", priority=-5)
    add(fleet, "b0", tenant="b")
    taken = []
    ending = ["running 0"]
    while ending:
        fleet.remove_request(ending.pop())
        for _, name in due(fleet):
            taken.append(name)
            ending.append(name)
    assert taken == ["a urgent", "b0", "a0", "a1", "a2"]


def test_under_fcfs_tenants_do_not_matter():
    one_slot = replace(ROOM, max_num_seqs=1)
    fleet = dispatcher(one_slot, one_slot, policy="fcfs")
    for name, tenant in (("0", "x"), ("1", "x"), ("2", "a"), ("3", "a"), ("4", "b")):
        add(fleet, name, tenant=tenant, priority=-int(name))
    assert [name for _, name in due(fleet)] == ["0", "1"]
    fleet.remove_request("0")
    assert [name for _, name in due(fleet)] == ["2"]


def test_proven_requests_of_a_dead_engine_continue_elsewhere_at_once_and_suspects_wait_for_its_successor():
    fleet = dispatcher(replace(ROOM, max_num_seqs=8), replace(ROOM, max_num_seqs=8))
    add(fleet, *"abcd")
    assert due(fleet) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    prove(fleet, 0, "a")
    assert fleet.engine_died(0, [0, 1], fault=True) is None
    assert due(fleet) == [(1, "a")]
    assert fleet.replica_of("c") == 0
    add(fleet, "e")
    assert due(fleet) == [(1, "e")], "the replica that is down gets nothing new"
    fleet.engine_up(0, ROOM)
    assert due(fleet) == [(0, "c")]
    add(fleet, "f")
    assert due(fleet) == [(1, "f")], "a suspect is tried alone"
    prove(fleet, 0, "c")
    fleet.remove_request("f")
    add(fleet, "g")
    assert due(fleet) == [(0, "g")]


def test_a_poisonous_request_meets_one_engine_only():
    fleet = dispatcher(ROOM, ROOM, ROOM)
    add(fleet, "poison")
    deaths = 0
    while due(fleet):
        deaths += 1
        convict = fleet.engine_died(0, [0], fault=True)
        fleet.engine_up(0, ROOM)
    assert (deaths, convict) == (2, "poison")


def test_suspects_whose_next_engine_takes_long_are_tried_elsewhere_each_alone():
    roomy = replace(ROOM, max_num_seqs=8)
    fleet = dispatcher(roomy, roomy)
    add(fleet, *"abcd")
    assert due(fleet) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    prove(fleet, 1, "b", "d")
    fleet.engine_died(0, None, fault=False, lost=True)
    assert due(fleet) == []
    fleet.release(0)
    assert due(fleet) == [(1, "a")]
    prove(fleet, 1, "a")
    assert due(fleet) == [(1, "c")]
    assert (fleet.num_at(0), fleet.num_queued) == (0, 0)
    fleet.engine_died(1, None, fault=False, lost=True)
    fleet.engine_up(0, roomy)
    fleet.release(1)
    fleet.release(0)
    for names in ("ab", "c", "d"):
        assert due(fleet) == [(0, name) for name in names], "c is tried before d follows it"
        prove(fleet, 0, *names)


def test_a_poison_whose_engine_does_not_come_back_is_convicted_by_the_next_one():
    fleet = dispatcher(ROOM, ROOM, ROOM)
    add(fleet, "poison")
    assert due(fleet) == [(0, "poison")]
    assert fleet.engine_died(0, [0], fault=True) is None
    fleet.release(0)
    ((replica, _),) = due(fleet)
    assert replica != 0
    assert fleet.engine_died(replica, [0], fault=True) == "poison"


def test_suspects_wait_for_the_only_replica_however_long_that_takes():
    fleet = dispatcher(ROOM)
    add(fleet, "a")
    due(fleet)
    fleet.engine_died(0, None, fault=False, lost=True)
    fleet.release(0)
    assert (due(fleet), fleet.num_at(0)) == ([], 1)
    fleet.engine_up(0, ROOM)
    assert due(fleet) == [(0, "a")]


def test_the_only_replica_has_a_request_at_once_unless_its_engine_is_down():
    fleet = dispatcher(ROOM)
    add(fleet, "a")
    assert (fleet.num_queued, fleet.replica_of("a")) == (0, 0)
    assert due(fleet) == [(0, "a")]
    prove(fleet, 0, "a")
    fleet.engine_died(0, None, fault=False)
    add(fleet, "b")
    assert (fleet.num_queued, fleet.replica_of("b"), due(fleet)) == (1, None, [])
    fleet.engine_up(0, ROOM)
    assert due(fleet) == [(0, "a"), (0, "b")]


def test_an_added_engine_takes_over_from_one_that_is_down():
    fleet = dispatcher(ROOM)
    add(fleet, "proven", "suspect")
    due(fleet)
    prove(fleet, 0, "proven")
    fleet.engine_died(0, None, fault=False, lost=True)
    fleet.add_replica(1, ROOM)
    assert due(fleet) == [(1, "proven")], "a suspect stays with its replica"
    fleet.release(0)
    fleet.remove_request("proven")
    assert due(fleet) == [(1, "suspect")]


def test_an_added_engine_tries_the_suspects_of_a_replica_that_has_been_down_for_long():
    fleet = dispatcher(ROOM)
    add(fleet, "a", "b")
    due(fleet)
    fleet.engine_died(0, None, fault=False, lost=True)
    fleet.release(0)
    assert due(fleet) == []
    fleet.add_replica(1, ROOM)
    assert due(fleet) == [(1, "a")]
    prove(fleet, 1, "a")
    assert due(fleet) == [(1, "b")]
    fleet.engine_up(0, ROOM)
    add(fleet, "c", "d")
    due(fleet)
    fleet.engine_died(0, None, fault=False)
    fleet.add_replica(2, ROOM)
    assert fleet.num_at(0) == 2, "it has been down for a moment only, this time"


def test_a_request_waiting_for_its_replicas_next_engine_is_in_no_engine():
    fleet = dispatcher(ROOM)
    add(fleet, "a")
    assert not fleet.is_in_engine("a")
    due(fleet)
    assert fleet.is_in_engine("a")
    fleet.engine_died(0, None, fault=False)
    assert fleet.replica_of("a") == 0
    assert not fleet.is_in_engine("a")


def test_outputs_of_a_replica_that_lost_the_request_are_ignored():
    fleet = dispatcher(ROOM, ROOM)
    add(fleet, "a")
    assert due(fleet) == [(0, "a")]
    assert fleet.drain(0) == ["a"]
    assert due(fleet) == [(1, "a")]
    assert not fleet.record_output(0, token("a"), 7)
    assert fleet.record_output(1, token("a"), 1)
    assert not fleet.record_output(1, token("unknown"), 1)


def test_begun_requests_continue_only_on_engines_of_the_same_arithmetic():
    other = replace(ROOM, arithmetic="other")
    fleet = dispatcher(ROOM, other)
    add(fleet, "begun", "fresh", "b")
    assert due(fleet) == [(0, "b"), (0, "begun"), (1, "fresh")]
    assert fleet.record_output(0, token("begun"), 1)
    assert fleet.drain(0) == ["b"]
    assert fleet.is_needed(0)
    assert due(fleet) == [(1, "b")]
    fleet.add_replica(2, ROOM)
    assert fleet.drain(0) == ["begun"]
    assert due(fleet) == [(2, "begun")]
    assert not fleet.is_needed(0)


def test_a_begun_request_that_is_queued_when_its_last_replica_drains_still_ends_there():
    fleet = dispatcher(ROOM, ROOM)
    add(fleet, *"abcd")
    due(fleet)
    prove(fleet, 0, "a", "c")
    fleet.engine_died(0, [], fault=True)
    assert due(fleet) == []
    fleet.engine_up(0, replace(ROOM, arithmetic="new"))
    assert due(fleet) == []
    assert fleet.unservable() == []
    assert fleet.drain(1) == ["b", "d"]
    assert fleet.is_needed(1)
    assert {(1, "a"), (1, "c")} <= set(due(fleet))
    for name in "ac":
        fleet.remove_request(name)
    assert not fleet.is_needed(1)


def test_requests_that_no_replica_can_continue_are_unservable():
    fleet = dispatcher(ROOM)
    add(fleet, "begun", "long", max_tokens=90)
    due(fleet)
    assert fleet.record_output(0, token("begun"), 1)
    fleet.engine_died(0, None, fault=False)
    fleet.engine_up(0, replace(ROOM, arithmetic="new", max_model_len=50))
    assert sorted(fleet.unservable()) == ["begun", "long"]
    assert (fleet.has_begun("begun"), fleet.has_begun("long")) == (True, False)


def test_requests_of_a_removed_replica_go_to_the_others():
    fleet = dispatcher(ROOM, ROOM)
    add(fleet, "a")
    due(fleet)
    fleet.engine_died(0, [0], fault=True)
    fleet.remove_replica(0)
    assert due(fleet) == [(1, "a")]


def test_without_a_decode_engine_the_prefill_engine_continues_and_hands_over_later():
    fleet = dispatcher(PREFILL, DECODE)
    add(fleet, "a", length=200)
    fleet.engine_died(1, None, fault=False)
    assert due(fleet) == [(0, "a")]
    fleet.record_output(0, token("a"), 1)
    assert fleet.take_leaving(0) == []
    fleet.engine_up(1, DECODE)
    fleet.record_output(0, token("a"), 2)
    assert fleet.take_leaving(0) == ["a"]


def test_a_request_whose_prefill_engine_dies_before_it_was_handed_over_goes_on_without_its_blocks():
    fleet = dispatcher(PREFILL, DECODE)
    add(fleet, "a", length=200)
    assert due(fleet) == [(0, "a")]
    for step in (1, 2):
        fleet.record_output(0, token("a"), step)
    fleet.take_leaving(0)
    fleet.engine_died(0, None, fault=True)
    assert due(fleet) == [(1, "a")]
    assert fleet.take_source("a") is None
    assert not fleet.handed_over(0, "a", BlockSource("file", "mark", ((1, 1),))), "a late word"
