"""A dispatcher under random traffic, with replicas that come, die, drain and go."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.api.request import BlockSource, SequenceOutput
from penstock.fleet.crash_blame import FAULTS
from penstock.fleet.router import ROUTERS
from tests.core.fakes import make_request
from tests.fleet.fleets import ROOM, NamedFleet, token


class FleetThatDies(RuleBasedStateMachine):
    """A server with a dispatcher, and engines that run all that they have, a token a step.

    Each answer is the numbers from 0 on; clients must receive exactly these, whichever engine dies. Some requests kill
    any engine that computes their second token.
    """

    def __init__(self):
        super().__init__()
        self.steps = self.names = self.numbers = 0
        self.told, self.length, self.deadly = {}, {}, set()
        self.engines = {}  # replica: its requests in the order of being handed over, or None while it is down
        self.replicas = {}  # replica: arithmetic
        self.roles = {}  # replica: role
        self.leaving = []  # (replica, request) that an engine was told to hand over
        self.handed_on = set()
        self.kinds = {}  # request: arithmetic that it began with
        self.killed = {}  # request: replicas that it killed, of those that it was not taken from as they stayed down
        self.num_killed = {}  # request: how many engines it killed
        self.overdue = set()  # replicas that are down for long
        self.late = []  # (replica, output) that arrive after their replica lost the request

    @initialize(router=st.sampled_from(sorted(ROUTERS)), policy=st.sampled_from(["fair", "fcfs", "priority"]))
    def begin(self, router, policy):
        self.fleet = NamedFleet(router, policy)
        self.add_replica("one", "any")
        self.add_replica("one", "any")

    def capacity(self, replica, arithmetic):
        return replace(ROOM, max_num_seqs=3, max_model_len=200, arithmetic=arithmetic, role=self.roles[replica])

    def add_replica(self, arithmetic, role):
        self.roles[self.numbers] = role
        self.fleet.add_replica(self.numbers, self.capacity(self.numbers, arithmetic))
        self.engines[self.numbers], self.replicas[self.numbers] = [], arithmetic
        self.numbers += 1
        self.hand_over()

    def hand_over(self):
        for replica, name in self.fleet.due():
            assert self.engines[replica] is not None, "handed over to an engine that is down"
            assert self.kinds.get(name, self.replicas[replica]) == self.replicas[replica], "another arithmetic"
            source = self.fleet.take_source(name)
            assert source is None or name in self.handed_on
            self.engines[replica].append(name)

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

    def step(self, replica):
        """A step of the replica's engine; its first three requests run."""
        self.steps += 1
        batch = [name for name in self.engines[replica] if name in self.told][:3]
        fatal = [name for name in batch if name in self.deadly and len(self.told[name]) == 1]
        if fatal:
            killed = self.killed.setdefault(fatal[0], set())
            killed.add(replica)
            self.num_killed[fatal[0]] = self.num_killed.get(fatal[0], 0) + 1
            assert self.num_killed[fatal[0]] <= 1 + FAULTS, "once with others, and then alone"
            assert len(killed & self.engines.keys()) == 1, "a poisonous request meets several engines"
            self.die(replica, [self.engines[replica].index(name) for name in batch], True)
            self.restart(replica, self.replicas[replica])
            return
        for name in batch:
            output = SequenceOutput(name, 0, [len(self.told[name])], first_scheduled=0.0)
            assert self.fleet.record_output(replica, output, self.steps)
            self.kinds[name] = self.replicas[replica]
            self.told[name] += output.token_ids
            assert self.told[name] == list(range(len(self.told[name])))
            if len(self.told[name]) == self.length[name]:
                self.end(name)
        self.leaving += [(replica, name) for name in self.fleet.take_leaving(replica)]
        self.hand_over()

    @precondition(lambda self: self.leaving)
    @rule()
    def hand_on(self):
        replica, name = self.leaving.pop(0)
        assert self.roles[replica] == "prefill"
        is_there = name in (self.engines[replica] or ())  # else it was drained meanwhile
        if is_there:
            self.engines[replica].remove(name)
            self.handed_on.add(name)
        goes_on = self.fleet.handed_over(replica, name, BlockSource("file", "mark", ((1, 1),)))
        assert goes_on == (is_there and name in self.told)
        assert not self.fleet.handed_over(replica, name, None), "it is told once"
        self.hand_over()

    def end(self, name):
        self.fleet.remove_request(name, [self.told.pop(name)])

    def die(self, replica, indices, fault):
        self.engines[replica] = None
        self.leaving = [(where, name) for where, name in self.leaving if where != replica]
        convict = self.fleet.engine_died(replica, indices, fault=fault)
        if convict is not None:
            self.end(convict)
        self.hand_over()

    def restart(self, replica, arithmetic):
        if arithmetic != self.replicas[replica]:  # then its suspects, too, can only go on elsewhere
            for killed in self.killed.values():
                killed.discard(replica)
        self.overdue.discard(replica)
        self.replicas[replica], self.engines[replica] = arithmetic, []
        self.fleet.engine_up(replica, self.capacity(replica, arithmetic))
        self.settle()

    def settle(self):
        for name in self.fleet.unservable():
            assert name in self.kinds, "a fresh request can go anywhere"
            assert self.kinds[name] not in self.replicas.values()
            self.end(name)
        self.hand_over()

    @precondition(lambda self: any(self.engines.values()))
    @rule(data=st.data(), count=st.integers(1, 4))
    def steps_of_one(self, data, count):
        replica = data.draw(st.sampled_from(sorted(replica for replica, engine in self.engines.items() if engine)))
        for _ in range(count):
            if self.engines.get(replica):
                self.step(replica)

    @rule(data=st.data(), in_step=st.booleans())
    def kill(self, data, in_step):
        replica = data.draw(st.sampled_from(sorted(self.engines)))
        if self.engines[replica] is not None:
            self.die(replica, list(range(min(3, len(self.engines[replica])))) if in_step else None, False)

    @rule(data=st.data(), changed=st.integers(0, 4))
    def come_back(self, data, changed):
        replica = data.draw(st.sampled_from(sorted(self.engines)))
        if self.engines[replica] is None:
            self.restart(replica, self.replicas[replica] if changed else "two")

    @rule(data=st.data())
    def stay_down(self, data):
        """A replica's next engine is long in coming: all that others can go on with leaves it."""
        replica = data.draw(st.sampled_from(sorted(self.engines)))
        self.fleet.release(replica)
        if self.engines[replica] is None:
            self.overdue.add(replica)
            for killed in self.killed.values():
                killed.discard(replica)
        self.hand_over()

    @precondition(lambda self: len(self.engines) < 4)
    @rule(arithmetic=st.sampled_from(["one", "one", "two"]), role=st.sampled_from(["any", "prefill", "decode"]))
    def grow(self, arithmetic, role):
        self.add_replica(arithmetic, role)

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def retire(self, data):
        replica = data.draw(st.sampled_from(sorted(self.engines)))
        for name in self.fleet.drain(replica):
            if name in (self.engines[replica] or ()):  # else it waited for the replica's next engine
                self.engines[replica].remove(name)
                self.late.append((replica, name))
        self.hand_over()
        for _ in range(200):
            if not self.fleet.is_needed(replica):
                break
            for other in list(self.engines):
                if self.engines[other] is None:
                    self.restart(other, self.replicas[other])
                elif self.engines[other]:
                    self.step(other)
            self.hand_over()
        assert not self.fleet.is_needed(replica), "a replica that drains never ends"
        self.leaving = [(where, name) for where, name in self.leaving if where != replica]
        self.fleet.remove_replica(replica)
        del self.engines[replica], self.replicas[replica]
        self.settle()

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def give_up(self, data):
        replica = data.draw(st.sampled_from(sorted(self.engines)))
        if self.engines[replica] is not None:
            self.die(replica, None, False)
        self.fleet.remove_replica(replica)
        del self.engines[replica], self.replicas[replica]
        self.settle()

    @rule()
    def late_words(self):
        while self.late:
            replica, name = self.late.pop()
            assert not self.fleet.record_output(replica, token(name), 0)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def abort(self, data):
        self.end(data.draw(st.sampled_from(sorted(self.told))))
        self.hand_over()

    @invariant()
    def nothing_waits_for_an_overdue_engine_if_another_could_go_on(self):
        for replica in self.overdue & self.engines.keys():
            if any(kind == self.replicas[replica] for other, kind in self.replicas.items() if other != replica):
                assert self.fleet.num_at(replica) == 0

    @invariant()
    def every_request_is_in_one_replica(self):
        if not hasattr(self, "fleet"):
            return
        at = sum(self.fleet.num_at(replica) for replica in self.engines)
        assert at + self.fleet.num_queued == len(self.told)
        for replica, engine in self.engines.items():
            live = [name for name in engine or () if name in self.told]
            assert self.fleet.num_in_engine(replica) == len(live)
            load = self.fleet.load_of(replica)
            assert load.num_open >= len(live)
            assert load.pending >= 0

    def teardown(self):
        """With all engines up every request comes to its end, and no poison has met more than one replica a life."""
        for _ in range(2000):
            if not getattr(self, "told", None):
                break
            for replica in list(self.engines):
                if self.engines[replica] is None:
                    self.restart(replica, self.replicas[replica])
                elif self.engines[replica]:
                    self.step(replica)
            self.hand_over()
        assert not self.told, "somebody waits for ever"
        if hasattr(self, "fleet"):
            assert self.fleet.num_queued == 0
            loads = [self.fleet.load_of(replica) for replica in self.engines]
            assert all(load.num_open == load.pending == 0 for load in loads)


FleetThatDies.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestFleetThatDies = FleetThatDies.TestCase
