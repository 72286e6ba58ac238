from concurrent.futures import Future
from dataclasses import replace

from penstock.api.request import ErrorReason, FinishReason, Request
from penstock.api.sampling_params import Structured
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.policies import OrderedQueue, by_arrival
from penstock.core.scheduler import EXPIRED, Scheduler
from penstock.engine.core import PendingRequests
from penstock.errors import InvalidRequestError
from tests.support.params import GREEDY


class Grammars:
    """Compiles when it is told to."""

    def __init__(self):
        self.futures = {}

    def awaited(self, request):
        form = request.params.structured
        return [] if form is None else [self.futures.setdefault(form, Future())]


def request(name, form=None):
    return Request(name, (1, 2, 3), replace(GREEDY, structured=form), arrival=0.0)


def make():
    grammars = Grammars()
    scheduler = Scheduler(
        KVManager((CacheGroup(64),), 4, 4), OrderedQueue(by_arrival), max_num_seqs=4, max_num_batched_tokens=64
    )
    return grammars, scheduler, PendingRequests(grammars.awaited)


FORM = Structured.regex("a")


def test_a_request_waits_for_its_grammar_and_others_do_not_wait_for_it():
    grammars, scheduler, pending = make()
    pending.add_request(scheduler, request("a", FORM), ())
    pending.add_request(scheduler, request("b"), ())
    assert len(pending) == 1
    scheduler.schedule()
    assert scheduler.request_indices() == [1]
    scheduler.fail_step("enough")
    grammars.futures[FORM].set_result(None)
    pending.admit_ready(scheduler)
    assert len(pending) == 0
    scheduler.schedule()
    assert scheduler.request_indices() == [0]


def test_requests_that_waited_are_served_in_the_order_of_arrival():
    grammars, scheduler, pending = make()
    pending.add_request(scheduler, request("a", FORM), ())
    pending.add_request(scheduler, request("b"), ())
    grammars.futures[FORM].set_result(None)
    pending.admit_ready(scheduler)
    scheduler.schedule()
    assert scheduler.request_indices() == [0, 1]


def test_a_grammar_that_fails_ends_its_request_alone():
    grammars, scheduler, pending = make()
    pending.add_request(scheduler, request("a", FORM), ())
    pending.add_request(scheduler, request("b"), ())
    grammars.futures[FORM].set_exception(InvalidRequestError("no", "structured"))
    pending.admit_ready(scheduler)
    (ending,) = scheduler.drain()
    assert (ending.request_id, ending.finish_reason, ending.error) == ("a", FinishReason.ERROR, "no")
    assert scheduler.has_work


def test_a_pending_request_can_be_ended_and_can_expire():
    _, scheduler, pending = make()
    for name in "ab":
        pending.add_request(scheduler, request(name, FORM), ())
    pending.release(scheduler, "a")
    scheduler.finish_request("a", None, FinishReason.ABORT)
    pending.release(scheduler, "b")
    scheduler.expire("b")
    assert [
        (output.request_id, output.finish_reason, output.error, output.error_reason) for output in scheduler.drain()
    ] == [
        ("a", FinishReason.ABORT, None, None),
        ("b", FinishReason.ERROR, EXPIRED, ErrorReason.EXPIRED),
    ]
    assert len(pending) == 0


def test_a_request_waits_for_all_that_it_needs():
    _, scheduler, _ = make()
    grammar, adapter = Future(), Future()
    pending = PendingRequests(lambda _: [grammar, adapter])
    pending.add_request(scheduler, request("a"), ())
    adapter.set_result("an adapter")
    pending.admit_ready(scheduler)
    assert (len(pending), scheduler.has_work) == (1, False)
    grammar.set_result("a grammar")
    pending.admit_ready(scheduler)
    assert (len(pending), scheduler.has_work) == (0, True)


def test_a_request_does_not_wait_for_the_rest_once_something_failed():
    _, scheduler, _ = make()
    failed = Future()
    pending = PendingRequests(lambda _: [Future(), failed])
    pending.add_request(scheduler, request("a"), ())
    failed.set_exception(ValueError("no such adapter"))
    pending.admit_ready(scheduler)
    assert [output.error for output in scheduler.drain()] == ["it could not be prepared: no such adapter"]


def test_a_grammar_that_only_ended_requests_wait_for_is_dropped():
    grammars, scheduler, _ = make()
    dropped = []
    pending = PendingRequests(grammars.awaited, dropped.append)
    for name in "ab":
        pending.add_request(scheduler, request(name, FORM), ())
    pending.release(scheduler, "a")
    assert dropped == []
    pending.release(scheduler, "b", goes_on=True)
    assert dropped == [], "one of its answers has ended, and others go on"
    pending.add_request(scheduler, request("c", FORM), ())
    pending.release(scheduler, "c")
    assert dropped == [grammars.futures[FORM]]
