"""A fleet's queue by hand, and under random traffic with places that come, die, drain and go."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.frontend.dispatch import Capacity, Dispatcher
from penstock.frontend.recovery.crash_blame import FAULTS
from penstock.frontend.router import ROUTERS
from penstock.request import BlockSource, SequenceOutput
from tests.core.fakes import make_request

ROOM = Capacity(
    num_blocks=100, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=100, arithmetic="one"
)


def dispatcher(*capacities, router="least-loaded", policy="fair"):
    made = Dispatcher(ROUTERS[router](), policy)
    for number, capacity in enumerate(capacities):
        made.add_place(number, capacity)
    return made


def add(fleet, *names, length=2, **options):
    for name in names:
        fleet.add_request(make_request(name, range(length), **options))


def due(fleet):
    """What is handed over now, by name."""
    return sorted(fleet.due(), key=lambda pair: pair[1])


def token(name):
    return SequenceOutput(name, 0, [1], first_scheduled=0.0)


def prove(fleet, place, *names):
    for step in (1, 2):
        for name in names:
            assert fleet.got(place, token(name), step)


def test_a_single_place_gets_everything_at_once():
    fleet = dispatcher(ROOM)
    add(fleet, *"abcdefgh", length=50)
    assert due(fleet) == [(0, name) for name in "abcdefgh"]
    assert not fleet.has_waiting


def test_several_places_get_no_more_than_their_engines_can_begin_with():
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
    assert fleet.got(0, token("0"), 1)
    assert due(fleet) == [(0, "4")]


def test_a_tenant_or_a_priority_does_not_wait_behind_prompts_that_it_would_overtake_in_the_engine():
    roomy = replace(ROOM, max_num_seqs=100)
    fleet = dispatcher(roomy, roomy)
    add(fleet, "long 0", "long 1", "long 2", length=90, tenant="big", max_tokens=1)
    assert len(due(fleet)) == 2
    add(fleet, "small", tenant="small")
    add(fleet, "urgent", tenant="big", priority=-1)
    assert {name for _, name in due(fleet)} == {"small", "urgent"}


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


def test_of_a_dead_engine_the_proven_go_on_elsewhere_at_once_and_suspects_wait_for_its_successor():
    fleet = dispatcher(replace(ROOM, max_num_seqs=8), replace(ROOM, max_num_seqs=8))
    add(fleet, *"abcd")
    assert due(fleet) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    prove(fleet, 0, "a")
    assert fleet.died(0, [0, 1], fault=True) is None
    assert due(fleet) == [(1, "a")]
    assert fleet.place_of("c") == 0
    add(fleet, "e")
    assert due(fleet) == [(1, "e")], "the place that is down gets nothing new"
    fleet.up(0, ROOM)
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
        convict = fleet.died(0, [0], fault=True)
        fleet.up(0, ROOM)
    assert (deaths, convict) == (2, "poison")


def test_suspects_of_an_engine_whose_successor_is_long_in_coming_are_tried_elsewhere_each_alone():
    roomy = replace(ROOM, max_num_seqs=8)
    fleet = dispatcher(roomy, roomy)
    add(fleet, *"abcd")
    assert due(fleet) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    prove(fleet, 1, "b", "d")
    fleet.died(0, None, fault=False, lost=True)
    assert due(fleet) == []
    fleet.release(0)
    assert due(fleet) == [(1, "a")]
    prove(fleet, 1, "a")
    assert due(fleet) == [(1, "c")]
    assert (fleet.num_at(0), fleet.num_queued) == (0, 0)
    fleet.died(1, None, fault=False, lost=True)
    fleet.up(0, roomy)
    fleet.release(1)
    fleet.release(0)
    for names in ("ab", "c", "d"):
        assert due(fleet) == [(0, name) for name in names], "c is tried before d follows it"
        prove(fleet, 0, *names)


def test_a_poison_whose_engine_does_not_come_back_is_convicted_by_the_next_one():
    fleet = dispatcher(ROOM, ROOM, ROOM)
    add(fleet, "poison")
    assert due(fleet) == [(0, "poison")]
    assert fleet.died(0, [0], fault=True) is None
    fleet.release(0)
    ((place, _),) = due(fleet)
    assert place != 0
    assert fleet.died(place, [0], fault=True) == "poison"


def test_suspects_wait_for_the_only_place_however_long_that_takes():
    fleet = dispatcher(ROOM)
    add(fleet, "a")
    due(fleet)
    fleet.died(0, None, fault=False, lost=True)
    fleet.release(0)
    assert (due(fleet), fleet.num_at(0)) == ([], 1)
    fleet.up(0, ROOM)
    assert due(fleet) == [(0, "a")]


def test_words_of_a_place_that_lost_a_request_do_not_count():
    fleet = dispatcher(ROOM, ROOM)
    add(fleet, "a")
    assert due(fleet) == [(0, "a")]
    assert fleet.drain(0) == ["a"]
    assert due(fleet) == [(1, "a")]
    assert not fleet.got(0, token("a"), 7)
    assert fleet.got(1, token("a"), 1)
    assert not fleet.got(1, token("unknown"), 1)


def test_begun_requests_go_on_only_where_it_is_computed_the_same():
    other = replace(ROOM, arithmetic="other")
    fleet = dispatcher(ROOM, other)
    add(fleet, "begun", "fresh", "b")
    assert due(fleet) == [(0, "b"), (0, "begun"), (1, "fresh")]
    assert fleet.got(0, token("begun"), 1)
    assert fleet.drain(0) == ["b"]
    assert fleet.is_needed(0)
    assert due(fleet) == [(1, "b")]
    fleet.add_place(2, ROOM)
    assert fleet.drain(0) == ["begun"]
    assert due(fleet) == [(2, "begun")]
    assert not fleet.is_needed(0)


def test_a_begun_request_that_is_queued_when_its_last_place_drains_still_ends_there():
    fleet = dispatcher(ROOM, ROOM)
    add(fleet, *"abcd")
    due(fleet)
    prove(fleet, 0, "a", "c")
    fleet.died(0, [], fault=True)
    assert due(fleet) == []
    fleet.up(0, replace(ROOM, arithmetic="new"))
    assert due(fleet) == []
    assert fleet.unservable() == []
    assert fleet.drain(1) == ["b", "d"]
    assert fleet.is_needed(1)
    assert {(1, "a"), (1, "c")} <= set(due(fleet))
    for name in "ac":
        fleet.remove_request(name)
    assert not fleet.is_needed(1)


def test_what_no_place_can_go_on_with_is_told():
    fleet = dispatcher(ROOM)
    add(fleet, "begun", "long", max_tokens=90)
    due(fleet)
    assert fleet.got(0, token("begun"), 1)
    fleet.died(0, None, fault=False)
    fleet.up(0, replace(ROOM, arithmetic="new", max_model_len=50))
    assert sorted(fleet.unservable()) == ["begun", "long"]
    assert (fleet.has_begun("begun"), fleet.has_begun("long")) == (True, False)


def test_a_place_that_is_given_up_leaves_all_it_had_to_the_others():
    fleet = dispatcher(ROOM, ROOM)
    add(fleet, "a")
    due(fleet)
    fleet.died(0, [0], fault=True)
    fleet.remove_place(0)
    assert due(fleet) == [(1, "a")]


def test_a_request_waits_for_the_place_that_has_its_prompt_rather_than_being_computed_elsewhere():
    fleet = dispatcher(*[replace(ROOM, max_num_seqs=2, max_num_batched_tokens=100)] * 2, router="prefix")
    add(fleet, "a", length=80)
    ((home, _),) = due(fleet)
    assert fleet.got(home, token("a"), 1)
    for name in ("other 0", "other 1"):  # keep the other engine more than half busy
        fleet.add_request(make_request(name, [9] * 80))
        assert due(fleet) == [(1 - home, name)]
        assert fleet.got(1 - home, token(name), 1)
    add(fleet, "b", "c", length=80)
    assert due(fleet) == [(home, "b")]
    fleet.remove_request("other 0")
    assert due(fleet) == [(1 - home, "c")], "an engine that is half idle takes what others have no slots for"
    add(fleet, "d", length=80)
    fleet.remove_request("a")
    assert due(fleet) == [(home, "d")]


@pytest.mark.parametrize("router", ROUTERS)
def test_places_are_worked_off_whatever_the_router(router):
    fleet = dispatcher(ROOM, ROOM, ROOM, router=router)
    add(fleet, *map(str, range(30)), length=5)
    done = []
    while fleet.has_waiting:
        for place, name in due(fleet):
            assert fleet.got(place, token(name), 1)
            fleet.remove_request(name, [[1]])
            done.append(name)
    assert sorted(done, key=int) == [str(i) for i in range(30)]
    assert all(fleet.load_of(place).num_open == fleet.load_of(place).pending == 0 for place in range(3))


PREFILL, DECODE = (
    replace(ROOM, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=500, role=role)
    for role in ("prefill", "decode")
)


def test_a_long_prompt_is_computed_by_a_prefill_engine_and_goes_on_at_another_one():
    fleet = dispatcher(PREFILL, DECODE, router="prefix")
    add(fleet, "long", length=200)
    add(fleet, "short", length=20)
    assert due(fleet) == [(0, "long"), (1, "short")]
    assert fleet.leaving(0) == []
    fleet.got(0, token("long"), 1)
    assert fleet.leaving(0) == ["long"]
    fleet.got(0, token("long"), 2)
    assert fleet.leaving(0) == [], "it is told once"
    source = BlockSource("file", "mark", ((4, 1), (5, 1)))
    assert fleet.handed_over(0, "long", source)
    assert due(fleet) == [(1, "long")]
    assert (fleet.take_source("long"), fleet.take_source("long")) == (source, None)
    assert fleet.load_of(1).pending <= 21, "nothing of it is to be computed"


def test_a_prompt_that_is_cached_where_answers_are_computed_needs_no_prefill_engine():
    fleet = dispatcher(PREFILL, DECODE, router="prefix")
    add(fleet, "first", length=200)
    assert due(fleet) == [(0, "first")]
    fleet.got(0, token("first"), 1)
    fleet.leaving(0)
    fleet.handed_over(0, "first", None)
    assert due(fleet) == [(1, "first")]
    fleet.got(1, token("first"), 1)
    add(fleet, "again", length=210)
    assert due(fleet) == [(1, "again")]


def test_without_an_engine_for_answers_the_one_for_prompts_goes_on_and_hands_over_later():
    fleet = dispatcher(PREFILL, DECODE)
    add(fleet, "a", length=200)
    fleet.died(1, None, fault=False)
    assert due(fleet) == [(0, "a")]
    fleet.got(0, token("a"), 1)
    assert fleet.leaving(0) == []
    fleet.up(1, DECODE)
    fleet.got(0, token("a"), 2)
    assert fleet.leaving(0) == ["a"]


def test_a_request_whose_prefill_engine_dies_before_it_was_handed_over_goes_on_without_its_blocks():
    fleet = dispatcher(PREFILL, DECODE)
    add(fleet, "a", length=200)
    assert due(fleet) == [(0, "a")]
    for step in (1, 2):
        fleet.got(0, token("a"), step)
    fleet.leaving(0)
    fleet.died(0, None, fault=True)
    assert due(fleet) == [(1, "a")]
    assert fleet.take_source("a") is None
    assert not fleet.handed_over(0, "a", BlockSource("file", "mark", ((1, 1),))), "a late word"


class FleetThatDies(RuleBasedStateMachine):
    """A server with a dispatcher, and engines that run all that they have, a token a step.

    Each answer is the numbers from 0 on; what is told must be exactly these, whatever dies. Some requests kill whatever
    engine computes their second token.
    """

    def __init__(self):
        super().__init__()
        self.steps = self.names = self.numbers = 0
        self.told, self.length, self.deadly = {}, {}, set()
        self.engines = {}  # place: its requests in the order of being handed over, or None while it is down
        self.places = {}  # place: arithmetic
        self.roles = {}  # place: role
        self.leaving = []  # (place, request) that an engine was told to hand over
        self.handed_on = set()
        self.kinds = {}  # request: arithmetic that it began with
        self.killed = {}  # request: places that it killed, of those that it was not taken from as they stayed down
        self.num_killed = {}  # request: how many engines it killed
        self.late = []  # (place, output) that arrive after their place lost the request

    @initialize(router=st.sampled_from(sorted(ROUTERS)), policy=st.sampled_from(["fair", "fcfs", "priority"]))
    def begin(self, router, policy):
        self.fleet = Dispatcher(ROUTERS[router](), policy)
        self.add_place("one", "any")
        self.add_place("one", "any")

    def capacity(self, place, arithmetic):
        return replace(ROOM, max_num_seqs=3, max_model_len=200, arithmetic=arithmetic, role=self.roles[place])

    def add_place(self, arithmetic, role):
        self.roles[self.numbers] = role
        self.fleet.add_place(self.numbers, self.capacity(self.numbers, arithmetic))
        self.engines[self.numbers], self.places[self.numbers] = [], arithmetic
        self.numbers += 1
        self.hand_over()

    def hand_over(self):
        for place, name in self.fleet.due():
            assert self.engines[place] is not None, "handed over to an engine that is down"
            assert self.kinds.get(name, self.places[place]) == self.places[place], "another arithmetic"
            source = self.fleet.take_source(name)
            assert source is None or name in self.handed_on
            self.engines[place].append(name)

    @rule(
        length=st.integers(1, 6),
        tenant=st.sampled_from("ab"),
        deadly=st.integers(0, 5),
        priority=st.integers(0, 1),
        prompt=st.sampled_from([4, 90]),
    )
    def accept(self, length, tenant, deadly, priority, prompt):
        name = str(self.names)
        self.names += 1
        self.told[name], self.length[name] = [], length
        if not deadly and length > 1:
            self.deadly.add(name)
        self.fleet.add_request(make_request(name, range(1, 1 + prompt), tenant=tenant, priority=priority))
        self.hand_over()

    def step(self, place):
        """A step of the place's engine; its first three requests run."""
        self.steps += 1
        batch = [name for name in self.engines[place] if name in self.told][:3]
        fatal = [name for name in batch if name in self.deadly and len(self.told[name]) == 1]
        if fatal:
            killed = self.killed.setdefault(fatal[0], set())
            killed.add(place)
            self.num_killed[fatal[0]] = self.num_killed.get(fatal[0], 0) + 1
            assert self.num_killed[fatal[0]] <= 1 + FAULTS, "once with others, and then alone"
            assert len(killed & self.engines.keys()) == 1, "a poisonous request meets several engines"
            self.die(place, [self.engines[place].index(name) for name in batch], True)
            self.restart(place, self.places[place])
            return
        for name in batch:
            output = SequenceOutput(name, 0, [len(self.told[name])], first_scheduled=0.0)
            assert self.fleet.got(place, output, self.steps)
            self.kinds[name] = self.places[place]
            self.told[name] += output.token_ids
            assert self.told[name] == list(range(len(self.told[name])))
            if len(self.told[name]) == self.length[name]:
                self.end(name)
        self.leaving += [(place, name) for name in self.fleet.leaving(place)]
        self.hand_over()

    @precondition(lambda self: self.leaving)
    @rule()
    def hand_on(self):
        place, name = self.leaving.pop(0)
        assert self.roles[place] == "prefill"
        is_there = name in (self.engines[place] or ())  # else it was drained meanwhile
        if is_there:
            self.engines[place].remove(name)
            self.handed_on.add(name)
        goes_on = self.fleet.handed_over(place, name, BlockSource("file", "mark", ((1, 1),)))
        assert goes_on == (is_there and name in self.told)
        assert not self.fleet.handed_over(place, name, None), "it is told once"
        self.hand_over()

    def end(self, name):
        self.fleet.remove_request(name, [self.told.pop(name)])

    def die(self, place, indices, fault):
        self.engines[place] = None
        self.leaving = [(where, name) for where, name in self.leaving if where != place]
        convict = self.fleet.died(place, indices, fault=fault)
        if convict is not None:
            self.end(convict)
        self.hand_over()

    def restart(self, place, arithmetic):
        if arithmetic != self.places[place]:  # then its suspects, too, can only go on elsewhere
            for killed in self.killed.values():
                killed.discard(place)
        self.places[place], self.engines[place] = arithmetic, []
        self.fleet.up(place, self.capacity(place, arithmetic))
        self.settle()

    def settle(self):
        for name in self.fleet.unservable():
            assert name in self.kinds, "a fresh request can go anywhere"
            assert self.kinds[name] not in self.places.values()
            self.end(name)
        self.hand_over()

    @precondition(lambda self: any(self.engines.values()))
    @rule(data=st.data(), count=st.integers(1, 4))
    def steps_of_one(self, data, count):
        place = data.draw(st.sampled_from(sorted(place for place, engine in self.engines.items() if engine)))
        for _ in range(count):
            if self.engines.get(place):
                self.step(place)

    @rule(data=st.data(), in_step=st.booleans())
    def kill(self, data, in_step):
        place = data.draw(st.sampled_from(sorted(self.engines)))
        if self.engines[place] is not None:
            self.die(place, list(range(min(3, len(self.engines[place])))) if in_step else None, False)

    @rule(data=st.data(), changed=st.integers(0, 4))
    def come_back(self, data, changed):
        place = data.draw(st.sampled_from(sorted(self.engines)))
        if self.engines[place] is None:
            self.restart(place, self.places[place] if changed else "two")

    @rule(data=st.data())
    def stay_down(self, data):
        """A place's next engine is long in coming: all that others can go on with leaves it."""
        place = data.draw(st.sampled_from(sorted(self.engines)))
        self.fleet.release(place)
        if self.engines[place] is None:
            for killed in self.killed.values():
                killed.discard(place)
            others = {kind for other, kind in self.places.items() if other != place}
            if self.places[place] in others:
                assert self.fleet.num_at(place) == 0
        self.hand_over()

    @precondition(lambda self: len(self.engines) < 4)
    @rule(arithmetic=st.sampled_from(["one", "one", "two"]), role=st.sampled_from(["any", "prefill", "decode"]))
    def grow(self, arithmetic, role):
        self.add_place(arithmetic, role)

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def retire(self, data):
        place = data.draw(st.sampled_from(sorted(self.engines)))
        for name in self.fleet.drain(place):
            if name in (self.engines[place] or ()):  # else it waited for the place's next engine
                self.engines[place].remove(name)
                self.late.append((place, name))
        self.hand_over()
        for _ in range(200):
            if not self.fleet.is_needed(place):
                break
            for other in list(self.engines):
                if self.engines[other] is None:
                    self.restart(other, self.places[other])
                elif self.engines[other]:
                    self.step(other)
            self.hand_over()
        assert not self.fleet.is_needed(place), "a place that drains never ends"
        self.leaving = [(where, name) for where, name in self.leaving if where != place]
        self.fleet.remove_place(place)
        del self.engines[place], self.places[place]
        self.settle()

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def give_up(self, data):
        place = data.draw(st.sampled_from(sorted(self.engines)))
        if self.engines[place] is not None:
            self.die(place, None, False)
        self.fleet.remove_place(place)
        del self.engines[place], self.places[place]
        self.settle()

    @rule()
    def late_words(self):
        while self.late:
            place, name = self.late.pop()
            assert not self.fleet.got(place, token(name), 0)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def abort(self, data):
        self.end(data.draw(st.sampled_from(sorted(self.told))))
        self.hand_over()

    @invariant()
    def every_request_is_in_one_place(self):
        if not hasattr(self, "fleet"):
            return
        at = sum(self.fleet.num_at(place) for place in self.engines)
        assert at + self.fleet.num_queued == len(self.told)
        for place, engine in self.engines.items():
            live = [name for name in engine or () if name in self.told]
            assert self.fleet.num_in_engine(place) == len(live)
            load = self.fleet.load_of(place)
            assert load.num_open >= len(live)
            assert load.pending >= 0

    def teardown(self):
        """With all engines up every request comes to its end, and no poison has met more than one place a life."""
        for _ in range(2000):
            if not getattr(self, "told", None):
                break
            for place in list(self.engines):
                if self.engines[place] is None:
                    self.restart(place, self.places[place])
                elif self.engines[place]:
                    self.step(place)
            self.hand_over()
        assert not self.told, "somebody waits for ever"
        if hasattr(self, "fleet"):
            assert self.fleet.num_queued == 0
            loads = [self.fleet.load_of(place) for place in self.engines]
            assert all(load.num_open == load.pending == 0 for load in loads)


FleetThatDies.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestFleetThatDies = FleetThatDies.TestCase
