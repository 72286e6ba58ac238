"""The store of recent responses: a state machine compares it with a plain model, and its log with what it holds."""

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.frontend.metrics import Metrics
from penstock.frontend.recovery.recent_responses import ITEM_BYTES, RESPONSE_BYTES, RecentResponses, StoredResponse

TENANTS = st.sampled_from("abc")
IDS = st.integers(0, 12).map(lambda number: f"r{number}")
ITEMS = st.lists(st.integers(0, 6).map(lambda number: f"i{number}"), max_size=3)
MAX_BYTES = 6 * RESPONSE_BYTES


def make(id, tenant="a", parent=None, items=(), size=0):
    return StoredResponse(id, tenant, parent, tuple(items), b"[]", bytes(size))


def store(max_bytes=MAX_BYTES, log=None):
    return RecentResponses(max_bytes, Metrics(), log)


class Log:
    """A log in memory."""

    def __init__(self):
        self.rows = {}

    def store_response(self, number, response):
        assert number > max(self.rows, default=-1)
        self.rows[number] = response

    def forget_response(self, number):
        del self.rows[number]

    def stored_responses(self):
        return sorted(self.rows.items())


class Store(RuleBasedStateMachine):
    """The model: everything that was ever put and not deleted. The store may only have lost some of it."""

    def __init__(self):
        super().__init__()
        self.log = Log()
        self.store = store(log=self.log)
        self.put = {}

    def held(self):
        return {(one.tenant, one.id): one for one in self.log.rows.values()}

    @rule(id=IDS, tenant=TENANTS, parent=st.none() | IDS, items=ITEMS, size=st.integers(0, 3000))
    def put_one(self, id, tenant, parent, items, size):
        before = self.held()
        given = make(id, tenant, parent, items, size)
        self.store.put(given)
        after = self.held()
        if (tenant, id) in before:
            assert after == before, "it stays as it is"
        elif after.get((tenant, id)) == given:
            self.put[tenant, id] = given
        lost = before.keys() - after.keys()
        if lost:
            assert len({name for name, _ in lost}) <= 2, "of the largest tenant, and of another that is then largest"

    @rule(id=IDS, tenant=TENANTS)
    def delete_one(self, id, tenant):
        assert self.store.delete(tenant, id) == ((tenant, id) in self.put and (tenant, id) in self.held_before)
        self.put.pop((tenant, id), None)

    @rule(id=IDS, tenant=TENANTS)
    def get_one(self, id, tenant):
        assert self.store.get(tenant, id) == self.held().get((tenant, id))

    @rule(id=IDS, tenant=TENANTS)
    def get_chain(self, id, tenant):
        held, expected, at = self.held(), [], id
        while at is not None and expected is not None:
            found = held.get((tenant, at))
            expected = None if found is None else [found, *expected]
            at = None if found is None else found.parent
        assert self.store.chain(tenant, id) == expected

    @rule(tenant=TENANTS, item=st.integers(0, 6).map(lambda number: f"i{number}"))
    def find_item(self, tenant, item):
        holders = [one for (name, _), one in self.held().items() if name == tenant and item in one.item_ids]
        found = self.store.with_item(tenant, item)
        assert found in holders if holders else found is None

    @rule(tenant=TENANTS, ids=st.lists(IDS, max_size=4))
    def use_some(self, tenant, ids):
        self.store.use(tenant, ids)

    @precondition(lambda self: self.log.rows)
    @rule()
    def restart(self):
        before = self.held()
        self.store = store(log=self.log)
        assert self.held() == before

    @rule(max_bytes=st.integers(0, MAX_BYTES))
    def restart_with_less(self, max_bytes):
        store(max_bytes, self.log).check_integrity()
        self.store = store(log=self.log)

    @invariant()
    def is_sound(self):
        self.store.check_integrity()
        self.held_before = self.held()
        assert self.put.items() >= self.held_before.items()
        assert self.store.num_bytes == sum(one.num_bytes for one in self.held_before.values())


TestStore = Store.TestCase
TestStore.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_tenant_that_holds_most_loses_its_least_recently_used():
    recent = store(10 * RESPONSE_BYTES)
    for number in range(7):
        recent.put(make(f"a{number}", "a"))
    recent.put(make("b0", "b"))
    recent.get("a", "a0")
    for number in range(1, 4):
        recent.put(make(f"b{number}", "b"))
    kept = [number for number in range(7) if recent.get("a", f"a{number}")]
    assert kept == [0, 3, 4, 5, 6]
    assert all(recent.get("b", f"b{number}") for number in range(4))


def test_the_use_of_a_response_keeps_what_it_continues_and_leaves_go_first():
    recent = store(4 * RESPONSE_BYTES + 100)
    recent.put(make("root"))
    recent.put(make("other"))
    recent.put(make("leaf", parent="root"))
    recent.put(make("x"))
    recent.put(make("y"))
    assert recent.get("a", "other") is None
    recent.put(make("z"))
    assert (recent.get("a", "leaf"), recent.chain("a", "root")) == (None, [make("root")])


def test_several_are_used_at_once_in_whatever_order_they_are_named():
    for ids in (["leaf", "root", "other"], ["root", "other", "leaf"], ["other", "leaf"]):
        recent = store(4 * RESPONSE_BYTES + 100)
        for response in (make("root"), make("leaf", parent="root"), make("other"), make("idle")):
            recent.put(response)
        recent.use("a", ids)
        recent.check_integrity()
        recent.put(make("new"))
        assert recent.get("a", "idle") is None
        assert recent.chain("a", "leaf") is not None


def test_a_response_that_lost_its_parent_can_be_got_but_not_continued():
    recent = store()
    recent.put(make("root"))
    recent.put(make("leaf", parent="root"))
    assert recent.chain("a", "leaf") == [make("root"), make("leaf", parent="root")]
    assert recent.delete("a", "root")
    assert recent.get("a", "leaf") == make("leaf", parent="root")
    assert recent.chain("a", "leaf") is None


@pytest.mark.parametrize("detour", [False, True])
def test_no_response_continues_itself(detour):
    recent = store()
    recent.put(make("x"))
    recent.put(make("y", parent="x"))
    recent.delete("a", "x")
    recent.put(make("x", parent="y" if detour else "x"))
    assert recent.get("a", "x") is None
    recent.check_integrity()


def test_tenants_see_only_their_own():
    recent = store()
    recent.put(make("r", "a", items=["i"]))
    assert recent.get("b", "r") is recent.chain("b", "r") is recent.with_item("b", "i") is None
    assert not recent.delete("b", "r")
    assert recent.with_item("a", "i").id == "r"


def test_a_store_without_room_stores_nothing_and_a_response_larger_than_the_store_takes_no_others_place():
    recent = store(0)
    recent.put(make("r"))
    assert recent.get("a", "r") is None
    recent = store()
    recent.put(make("small"))
    recent.put(make("large", size=MAX_BYTES))
    assert (recent.get("a", "large"), recent.get("a", "small")) == (None, make("small"))


def test_what_a_response_takes_is_counted_with_its_items_and_shown():
    metrics = Metrics()
    recent = RecentResponses(MAX_BYTES, metrics)
    recent.put(make("r", items=["i", "j"], size=100))
    taken = RESPONSE_BYTES + 2 * ITEM_BYTES + 100 + len(b"[]")
    assert metrics.stored_responses.values == {"": 1}
    assert metrics.stored_response_bytes.values == {"": taken}
    recent.delete("a", "r")
    assert metrics.stored_response_bytes.values == {"": 0}
