from concurrent.futures import Future
from dataclasses import replace

from penstock.core.kv_manager import KVManager
from penstock.core.policies import OrderedQueue, by_arrival
from penstock.core.scheduler import EXPIRED, Scheduler
from penstock.engine.latecomers import Latecomers
from penstock.errors import InvalidRequestError
from penstock.request import ErrorReason, FinishReason, Request
from penstock.sampling_params import Structured
from tests.params import GREEDY


class Grammars:
    """Compiles when it is told to."""

    def __init__(self):
        self.futures = {}

    def compile(self, structured):
        return self.futures.setdefault(structured, Future())


def request(name, form=None):
    return Request(name, (1, 2, 3), replace(GREEDY, structured=form), arrival=0.0)


def make():
    grammars = Grammars()
    scheduler = Scheduler(KVManager(64, 4, 4), OrderedQueue(by_arrival), max_num_seqs=4, max_num_batched_tokens=64)
    return grammars, scheduler, Latecomers(grammars)


FORM = Structured.regex("a")


def test_a_request_waits_for_its_grammar_and_others_do_not_wait_for_it():
    grammars, scheduler, late = make()
    late.add(scheduler, request("a", FORM), ())
    late.add(scheduler, request("b"), ())
    assert len(late) == 1
    scheduler.schedule()
    assert scheduler.under_way() == [1]
    scheduler.fail("enough")
    grammars.futures[FORM].set_result(None)
    late.pass_on(scheduler)
    assert len(late) == 0
    scheduler.schedule()
    assert scheduler.under_way() == [0]


def test_who_was_late_is_served_in_the_order_of_arrival():
    grammars, scheduler, late = make()
    late.add(scheduler, request("a", FORM), ())
    late.add(scheduler, request("b"), ())
    grammars.futures[FORM].set_result(None)
    late.pass_on(scheduler)
    scheduler.schedule()
    assert scheduler.under_way() == [0, 1]


def test_a_grammar_that_fails_ends_its_request_alone():
    grammars, scheduler, late = make()
    late.add(scheduler, request("a", FORM), ())
    late.add(scheduler, request("b"), ())
    grammars.futures[FORM].set_exception(InvalidRequestError("no", "structured"))
    late.pass_on(scheduler)
    (ending,) = scheduler.drain()
    assert (ending.request_id, ending.finish_reason, ending.error) == ("a", FinishReason.ERROR, "no")
    assert scheduler.has_work


def test_a_late_request_can_be_ended_and_can_expire():
    _, scheduler, late = make()
    for name in "ab":
        late.add(scheduler, request(name, FORM), ())
    late.release(scheduler, "a")
    scheduler.finish("a", None, FinishReason.ABORT)
    late.release(scheduler, "b")
    scheduler.expire("b")
    assert [(one.request_id, one.finish_reason, one.error, one.error_reason) for one in scheduler.drain()] == [
        ("a", FinishReason.ABORT, None, None),
        ("b", FinishReason.ERROR, EXPIRED, ErrorReason.EXPIRED),
    ]
    assert len(late) == 0
