"""The ledger by hand, and under random traffic with an engine that dies of some requests and of no reason at all."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.fleet.crash_blame import DEATHS, FAULTS, CrashBlame
from penstock.fleet.request import FleetRequest
from tests.core.fakes import make_request


class NamedBlame:
    """The blame of one replica, for tests that speak of requests by their names."""

    def __init__(self):
        self.blame = CrashBlame()
        self.requests = {}

    num_waiting = property(lambda self: self.blame.num_waiting)
    num_in_engine = property(lambda self: self.blame.num_in_engine)

    def add_request(self, name, request=None):
        self.requests[name] = request or FleetRequest(make_request(name, [1]))
        self.blame.add_request(self.requests[name])

    def remove_request(self, name):
        request = self.requests.pop(name)
        self.blame.remove_request(request)
        return request

    def due(self):
        return [request.request_id for request in self.blame.due()]

    def progressed(self, name, step):
        self.blame.progressed(self.requests[name], step)

    def died(self, indices, **how):
        convict = self.blame.died(indices, **how)
        return None if convict is None else convict.request_id


def handed_over(*request_ids, proven=()):
    """The blame of an engine that has these requests, some of them proven."""
    blame = NamedBlame()
    for request_id in request_ids:
        blame.add_request(request_id)
    assert blame.due() == list(request_ids)
    for request_id in proven:
        blame.progressed(request_id, 1)
        blame.progressed(request_id, 2)
    return blame


def test_requests_are_handed_over_at_once_and_in_order():
    blame = handed_over("a", "b")
    blame.add_request("c")
    assert blame.due() == ["c"]
    assert (blame.num_waiting, blame.num_in_engine) == (0, 3)


def test_all_of_a_dead_engine_go_to_the_next_and_those_that_are_proven_go_together():
    blame = handed_over("a", "b", "c", proven="abc")
    blame.add_request("late")
    assert blame.died([0, 1, 2], fault=True) is None
    assert blame.due() == ["a", "b", "c", "late"]


def test_of_those_that_died_together_unproven_one_at_a_time_is_tried():
    blame = handed_over("a", "b", "c", proven="b")
    blame.died([0, 1, 2], fault=True)
    blame.add_request("late")
    assert blame.due() == ["b"]
    assert blame.due() == [], "b is not proven in this engine"
    blame.progressed("b", 1)
    blame.progressed("b", 1)
    assert blame.due() == [], "a prompt is not a decode"
    blame.progressed("b", 2)
    assert blame.due() == ["a"]
    blame.remove_request("a")
    assert blame.due() == ["c"]
    blame.progressed("c", 7)
    blame.progressed("c", 8)
    assert blame.due() == ["late"]


def test_whoever_was_not_in_the_step_is_not_under_suspicion():
    blame = handed_over("a", "b", "c")
    blame.died([0, 1], fault=True)
    assert blame.due() == ["c"]
    for step in (1, 2):
        blame.progressed("c", step)
    assert blame.due() == ["a"]


def test_without_a_step_any_of_the_unproven_may_be_to_blame():
    blame = handed_over("a", "b", "c", proven="a")
    blame.died(None, fault=True)
    assert blame.due() == ["a"]
    for step in (1, 2):
        blame.progressed("a", step)
    assert blame.due() == ["b"]


def test_a_request_alone_under_suspicion_is_tried_alone_and_then_convicted():
    blame = handed_over("a", "poison", proven="a")
    assert blame.died([0, 1], fault=True) is None
    assert blame.due() == ["poison"]
    assert blame.due() == []
    assert blame.died([0], fault=True) == "poison"
    assert blame.due() == ["a"]


def test_whoever_passes_its_trial_is_joined_by_the_others():
    blame = handed_over("late killer", "innocent", proven=["late killer"])
    assert blame.died([0, 1], fault=True) is None
    assert blame.due() == ["innocent"]
    for step in (1, 2):
        blame.progressed("innocent", step)
    assert blame.due() == ["late killer"]
    assert blame.died([0, 1], fault=True) is None
    assert blame.due() == ["late killer"], "its turn to be tried"
    assert blame.died([0], fault=True) == "late killer"
    assert blame.due() == ["innocent"]


def test_a_kill_from_outside_weighs_less():
    blame = handed_over("a")
    for _ in range(DEATHS - 1):
        assert blame.died([0], fault=False) is None
        assert blame.due() == ["a"]
    assert blame.died([0], fault=False) == "a"


def test_a_lost_machine_makes_suspects_that_need_not_be_alone_but_counts():
    blame = handed_over("a", "b", proven="b")
    assert blame.died(None, fault=False, lost=True) is None
    assert blame.due() == ["b"]
    for step in (1, 2):
        blame.progressed("b", step)
    assert blame.due() == ["a"], "beside one that is proven"
    for _ in range(DEATHS - 2):
        assert blame.died(None, fault=False, lost=True) is None
        blame.progressed("b", 1)
        blame.remove_request("b")
        assert blame.due() == ["a"]
    assert blame.died(None, fault=False, lost=True) == "a"


def test_a_suspect_takes_its_case_to_another_replica():
    blame, other = handed_over("a", "poison", proven=["a"]), handed_over("b")
    assert blame.died([0, 1], fault=True) is None
    assert not blame.remove_request("a").case.suspect
    other.add_request("poison", blame.remove_request("poison"))
    other.add_request("late")
    assert other.due() == [], "it has a mark, and must be alone"
    other.remove_request("b")
    assert other.due() == ["poison"], "and nobody follows"
    assert other.died([1], fault=True) == "poison"
    assert other.due() == ["late"]
    assert blame.num_waiting == blame.num_in_engine == 0


def test_progress_wipes_the_slate_clean():
    blame = handed_over("a")
    for _ in range(5):
        assert blame.died([0], fault=True) is None
        blame.due()
        for step in (1, 2):
            blame.progressed("a", step)
        assert blame.died([0], fault=True) is None, "it was not under suspicion"
        blame.due()


class EngineThatDies(RuleBasedStateMachine):
    """A server with a ledger, and engines that run a few requests at a time, in order.

    A request has a number of tokens, and perhaps one at which it kills whatever engine computes it, be it as the first
    in that engine or as a later one.
    """

    SLOTS = 3

    def __init__(self):
        super().__init__()
        self.blame = NamedBlame()
        self.left = {}  # tokens to go, of each live request
        self.deadly = {}  # at how many to go it kills
        self.engine = []  # in the order of being handed over, as a list of [request, steps in this engine]
        self.indices = {}
        self.steps = self.names = self.deaths = 0
        self.convicted = set()
        self.outside = False

    def hand_over(self):
        for request_id in self.blame.due():
            self.indices[request_id] = len(self.indices)
            self.engine.append([request_id, 0])

    def run_step(self):
        self.steps += 1
        batch = self.engine[: self.SLOTS]
        for request_id, _ in batch:
            if self.deadly[request_id] == self.left[request_id]:
                self.die([self.indices[one] for one, _ in batch], fault=True)
                return
        for entry in batch:
            entry[1] += 1
            self.left[entry[0]] -= 1
            self.blame.progressed(entry[0], self.steps)
            if not self.left[entry[0]]:
                self.forget(entry[0])
        self.hand_over()

    def die(self, request_indices, fault):
        convict = self.blame.died(request_indices, fault=fault)
        self.engine, self.indices, self.steps = [], {}, 0
        self.deaths += 1
        if convict is not None:
            assert self.outside or self.deadly[convict] == self.left[convict], "an innocent is convicted"
            self.convicted.add(convict)
            del self.left[convict]
        self.hand_over()

    def forget(self, request_id):
        self.blame.remove_request(request_id)
        del self.left[request_id]
        self.engine = [entry for entry in self.engine if entry[0] != request_id]

    @rule(tokens=st.integers(1, 5), deadly=st.sampled_from([0, 0, 0, 1, 2, 4]))
    def accept(self, tokens, deadly):
        request_id = str(self.names)
        self.names += 1
        self.left[request_id], self.deadly[request_id] = tokens, deadly
        self.blame.add_request(request_id)
        self.hand_over()

    @precondition(lambda self: self.engine)
    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            if self.engine:
                self.run_step()

    @rule(in_step=st.booleans())
    def kill(self, in_step):
        self.outside = True
        self.die(
            [self.indices[one] for one, _ in self.engine[: self.SLOTS]] if in_step and self.engine else None, False
        )

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def abort(self, data):
        self.forget(data.draw(st.sampled_from(sorted(self.left))))
        self.hand_over()

    @invariant()
    def everybody_is_in_one_place(self):
        assert self.blame.num_in_engine == len(self.engine)
        assert self.blame.num_in_engine + self.blame.num_waiting == len(self.left)
        assert bool(self.engine) == bool(self.left), "somebody waits while the engine has nothing to do"

    def teardown(self):
        """Without further kills all others come to their end, after a bounded number of deaths."""
        bound = self.deaths + 2 * sum(self.left.values()) + (FAULTS + DEATHS + 1) * (len(self.left) + 1)
        while self.left:
            self.run_step()
            assert self.deaths <= bound, "one request takes the service down"


EngineThatDies.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEngineThatDies = EngineThatDies.TestCase
