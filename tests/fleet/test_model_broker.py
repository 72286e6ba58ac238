"""The broker of several models' memory."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.fleet.model_broker import ModelBroker, Moves, reservation


def broker_of(needs, total=100, max_loaded=3, keep_alive=60.0):
    broker = ModelBroker(total, max_loaded, keep_alive)
    for name, needed in needs.items():
        broker.add_model(name, needed)
    return broker


def load(broker, name, now):
    """Load a model and use it for a moment."""
    assert not broker.ask(name)
    for unloaded in broker.next(now).unload:
        broker.unloaded(unloaded)
        broker.next(now)
    assert broker.models[name].state == "loading"
    broker.loaded(name, broker.models[name].needed, now)
    broker.next(now)
    broker.end_use(name, now)


def test_a_model_is_loaded_when_it_is_used_and_stays_for_its_time():
    broker = broker_of({"a": 10})
    assert not broker.ask("a")
    assert broker.next(0.0) == Moves(load="a")
    broker.loaded("a", 8, 2.0)
    assert broker.next(2.0) == Moves()
    assert broker.models["a"].num_uses == 1
    broker.end_use("a", 5.0)
    assert broker.next_expiry() == 65.0
    assert broker.next(64.9) == Moves()
    assert broker.ask("a")
    assert broker.next(70.0) == Moves(), "a model in use is never unloaded"
    broker.end_use("a", 71.0)
    assert broker.next(131.0) == Moves(unload=("a",))


def test_a_use_may_set_the_time_that_its_model_stays():
    broker = broker_of({"a": 10})
    load(broker, "a", 0.0)
    broker.keep("a", 0.0)
    assert broker.next(0.0) == Moves(unload=("a",))
    broker.unloaded("a")
    assert broker.models["a"].keep_alive == 60.0, "for this load only"


def test_the_least_recently_used_model_makes_room():
    broker = broker_of({"a": 50, "b": 50, "c": 50})
    load(broker, "a", 0.0)
    load(broker, "b", 1.0)
    assert broker.ask("a")
    broker.end_use("a", 2.0)
    assert not broker.ask("c")
    assert broker.next(3.0) == Moves(unload=("b",)), "c waits until b is gone"
    assert broker.next(3.0) == Moves()
    broker.unloaded("b")
    assert broker.next(4.0) == Moves(load="c")


def test_no_more_models_are_loaded_than_may_be():
    broker = broker_of({"a": 1, "b": 1, "c": 1}, max_loaded=2)
    load(broker, "a", 0.0)
    load(broker, "b", 1.0)
    assert not broker.ask("c")
    assert broker.next(2.0) == Moves(unload=("a",))


def test_a_model_in_use_gets_no_new_uses_while_another_waits_for_its_room():
    broker = broker_of({"a": 100, "b": 100})
    load(broker, "a", 0.0)
    assert broker.ask("a")
    assert not broker.ask("b")
    assert broker.next(1.0) == Moves()
    assert not broker.ask("a"), "it waits, or b would wait forever"
    broker.end_use("a", 2.0)
    assert broker.next(2.0) == Moves(unload=("a",))
    broker.unloaded("a")
    assert broker.next(3.0) == Moves(load="b")
    broker.loaded("b", 100, 4.0)
    assert broker.next(4.0) == Moves()
    broker.end_use("b", 5.0)
    assert broker.next(5.0) == Moves(unload=("b",)), "now a is wanted again"


def test_a_model_that_nobody_waits_for_any_more_makes_nobody_leave():
    broker = broker_of({"a": 100, "b": 100})
    load(broker, "a", 0.0)
    assert broker.ask("a")
    assert not broker.ask("b")
    broker.next(1.0)
    assert not broker.ask("a")
    broker.withdraw("b")
    assert broker.next(1.0) == Moves()
    assert broker.models["a"].num_uses == 2, "who waited uses it now"


def test_a_failed_load_ends_its_waiting_uses_and_lets_the_next_model_load():
    broker = broker_of({"a": 100, "b": 100})
    assert not broker.ask("a")
    assert not broker.ask("b")
    assert broker.next(0.0) == Moves(load="a")
    broker.failed("a")
    assert broker.models["a"].num_waiting == 0
    assert broker.next(0.0) == Moves(load="b")


def test_a_model_whose_engines_are_lost_is_loaded_again_for_who_waits():
    broker = broker_of({"a": 10})
    load(broker, "a", 0.0)
    assert broker.ask("a")
    broker.lost("a")
    assert not broker.ask("a")
    assert broker.next(1.0) == Moves(), "its memory is not free yet"
    broker.unloaded("a")
    assert broker.next(1.0) == Moves(load="a")


def test_a_replaced_model_is_unloaded_after_its_uses_and_who_waits_gets_the_new_one():
    broker = broker_of({"a": 60, "b": 60})
    load(broker, "a", 0.0)
    assert broker.ask("a")
    assert not broker.ask("b")
    broker.next(1.0)
    assert not broker.ask("a"), "b waits for its room"
    assert broker.retire("a", "old a") == 1
    broker.add_model("a", 60, 1)
    assert broker.next(1.0) == Moves(), "the old one is in use"
    broker.end_use("old a", 2.0)
    assert broker.next(2.0) == Moves(unload=("old a",))
    broker.unloaded("old a")
    broker.forget("old a")
    assert broker.next(3.0) == Moves(load="b"), "in the order in which they were asked for"
    broker.loaded("b", 60, 4.0)
    broker.next(4.0)
    broker.end_use("b", 5.0)
    assert broker.next(5.0) == Moves(unload=("b",))
    broker.unloaded("b")
    assert broker.next(6.0) == Moves(load="a")


def test_models_reserve_equal_shares_unless_their_files_are_larger():
    assert reservation(8, total=120, num_models=2, max_loaded=3) == 60
    assert reservation(8, total=120, num_models=9, max_loaded=3) == 40
    assert reservation(80, total=120, num_models=9, max_loaded=3) == 100


class BrokerMachine(RuleBasedStateMachine):
    """Calls in any order; who waits is served once the uses of others end."""

    @initialize(
        needs=st.lists(st.integers(0, 120), min_size=1, max_size=5),
        max_loaded=st.integers(1, 4),
        keep_alive=st.sampled_from([0.0, 5.0, float("inf")]),
    )
    def begin(self, needs, max_loaded, keep_alive):
        self.broker = broker_of(dict(zip("abcde", needs, strict=False)), 100, max_loaded, keep_alive)
        self.now, self.pending, self.retired = 0.0, [], 0

    def advance(self):
        moves = self.broker.next(self.now)
        for name in moves.unload:
            assert not self.broker.models[name].num_uses
            self.pending.append(("unload", name))
        if moves.load is not None:
            self.pending.append(("load", moves.load))

    def finish(self, index, fails=False):
        what, name = self.pending.pop(index)
        if what == "unload":
            self.broker.unloaded(name)
        elif fails:
            self.broker.failed(name)
        else:
            self.broker.loaded(name, self.broker.models[name].needed // 2, self.now)
        self.advance()

    @rule(data=st.data())
    def ask(self, data):
        served = sorted(name for name, one in self.broker.models.items() if not one.is_retired)
        if served:
            self.broker.ask(data.draw(st.sampled_from(served)))
            self.advance()

    @rule(data=st.data())
    def end(self, data):
        used = [name for name, one in self.broker.models.items() if one.num_uses]
        waiting = [name for name, one in self.broker.models.items() if one.num_waiting]
        if used:
            self.broker.end_use(data.draw(st.sampled_from(used)), self.now)
        elif waiting:
            self.broker.withdraw(data.draw(st.sampled_from(waiting)))
        self.advance()

    @rule(data=st.data(), fails=st.booleans())
    @precondition(lambda self: self.pending)
    def finish_any(self, data, fails):
        self.finish(data.draw(st.integers(0, len(self.pending) - 1)), fails)

    @rule(data=st.data())
    def lose(self, data):
        loaded = [name for name, one in self.broker.models.items() if one.state == "loaded"]
        if loaded:
            name = data.draw(st.sampled_from(loaded))
            self.broker.lost(name)
            self.pending.append(("unload", name))

    @rule(data=st.data(), is_replaced=st.booleans())
    def retire(self, data, is_replaced):
        served = [name for name, one in self.broker.models.items() if not one.is_retired]
        if served:
            self.retired += 1
            name, retired = data.draw(st.sampled_from(served)), f"old {self.retired}"
            waiting = self.broker.retire(name, retired)
            self.pending = [(what, retired if one == name else one) for what, one in self.pending]
            if is_replaced:
                self.broker.add_model(name, 20, waiting)
            self.advance()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds):
        self.now += seconds
        self.advance()

    @invariant()
    def is_consistent(self):
        if hasattr(self, "broker"):
            self.broker.check_integrity()

    def teardown(self):
        if not hasattr(self, "broker"):
            return
        for _ in range(200):
            models = self.broker.models.values()
            if not any(model.num_waiting or model.num_uses for model in models) and not self.pending:
                return
            for name, one in self.broker.models.items():
                for _ in range(one.num_uses):
                    self.broker.end_use(name, self.now)
            self.advance()
            if self.pending:
                self.finish(0)
            self.broker.check_integrity()
        raise AssertionError("a use waits forever")


TestAnyOrder = BrokerMachine.TestCase
