"""Why a request took so long: from accounts of steps, by hand and from a real scheduler."""

import dataclasses
import sys

from penstock.core.plan import StepTrace
from penstock.engine.info import StepRecord
from penstock.frontend.history import MAX_REQUESTS, MAX_STEPS, STEPS_A_PIECE, History, chrome_trace
from tests.core.fakes import FakeRunner, make_request, make_scheduler, run_step


def record(began, **account):
    return StepRecord(began, 0.1, 0.7, 0.2, StepTrace(4, 2, **account))


def accept(history, request, alias=None):
    """A request comes, and goes to the only engine at once."""
    accepted = history.accepted(request, alias)
    accepted.handed_over(0, request.arrival)
    return accepted


def told(history, name):
    (request_record,) = history.find(name)
    return [(e.what, e.at, e.steps, e.tokens, e.why) for e in history.explain(request_record)]


def test_a_request_is_explained_by_its_waits_chunks_and_preemptions_with_equal_steps_merged():
    history = History("fair")
    accept(history, make_request("call-0", [1] * 9), "mine")
    history.record_step(record(-5.0, blocked=("older", "slots")))
    for began in (0.0, 1.0):
        history.record_step(record(began, blocked=("other", "slots")))
    history.record_step(record(2.0, blocked=("call-0", "blocks")))
    history.record_step(record(3.0, admitted=[("call-0", 4)], chunks=[("call-0", 3)]))
    history.record_step(record(4.0, chunks=[("call-0", 2), ("other", 9)]))
    for began in (5.0, 6.0, 7.0):
        history.record_step(record(began))
    history.record_step(record(8.0, preempted=["call-0"], blocked=("call-0", "preemption")))
    history.record_step(record(9.0, blocked=("call-0", "blocks")))
    assert told(history, "call-0") == [
        ("waited", 0.0, 2, None, "fair: behind other, which waits for slots"),
        ("waited", 2.0, 1, None, "blocks"),
        ("admitted", 3.0, 1, 4, None),
        ("computed", 3.0, 1, 3, None),
        ("computed", 4.0, 1, 2, None),
        ("generated", 5.0, 3, None, None),
        ("preempted", 8.0, 1, None, None),
        ("waited", 9.0, 1, None, "blocks"),
    ]
    assert told(history, "mine") == told(history, "call") == told(history, "call-0")
    assert history.find("cal") == []


def test_a_request_that_comes_during_a_step_waits_from_its_arrival_on():
    history = History("fcfs")
    accept(history, dataclasses.replace(make_request("a", [1]), arrival=0.75))
    history.record_step(record(0.0, blocked=("other", "slots")))
    history.record_step(record(1.0, blocked=("a", "slots")))
    (request_record,) = history.find("a")
    first, second = history.explain(request_record)
    assert (first.what, first.at, first.seconds) == ("waited", 0.0, 0.25)
    assert (second.what, second.at, second.seconds) == ("waited", 0.25, 1.0)


def test_the_account_of_a_real_scheduler_adds_up():
    scheduler, runner, history = make_scheduler(max_num_seqs=1, budget=8), FakeRunner(16, 4), History("fcfs")
    records = {}
    for name in ("a", "b"):
        request = make_request(name, [1] * 6, 3, stop_token_ids=())
        scheduler.add_request(request)
        records[name] = accept(history, request)
    step = 0
    while scheduler.has_work:
        outputs = run_step(scheduler, runner)
        history.record_step(StepRecord(step + 0.5, 0.0, 0.5, 0.0, scheduler.trace))
        step += 1
        for output in outputs:
            records[output.request_id].progressed(float(step), len(output.token_ids), output.finish_reason)
    (request_record,) = history.find("b")
    events = history.explain(request_record)
    assert [event.what for event in events] == ["waited", "admitted", "computed", "generated"]
    waited, admitted, computed, generated = events
    assert waited.why == "slots"
    assert admitted.tokens + computed.tokens == 6
    assert waited.steps + computed.steps + generated.steps == step
    assert request_record.ended == step
    assert request_record.finish_reasons == ["length"]


def test_only_so_much_is_remembered():
    history = History("fcfs", clock=lambda: MAX_STEPS + 10.0)
    for i in range(MAX_REQUESTS + 5):
        history.accepted(make_request(f"r{i}", [1]), None)
    assert len(history.records()) == MAX_REQUESTS
    assert history.find("r4") == []
    for i in range(MAX_STEPS + 10):
        history.record_step(record(float(i)))
    assert 601 <= len(history.steps(1e9)) < 601 + STEPS_A_PIECE
    assert len(history.steps(20.5)) == 20


def test_steps_are_remembered_as_they_were_and_in_order_however_many_there_are():
    history = History("fcfs", clock=lambda: 9.0)
    steps = [record(i / 100, admitted=[(f"r{i}", i)], blocked=("a", "slots")) for i in range(3 * STEPS_A_PIECE + 7)]
    for step in steps:
        history.record_step(step)
    assert history.steps(9.0) == steps
    accept(history, dataclasses.replace(make_request("r150", [1]), arrival=1.5)).progressed(2.55, 1, "length")
    waited, admitted, generated = told(history, "r150")
    assert (waited[0], waited[2]) == ("waited", 99)
    assert admitted == ("admitted", 0.0, 1, 150, None)
    assert (generated[0], generated[2]) == ("generated", 106)
    for i in range(2 * MAX_STEPS):
        history.record_step(record(3.0 + i / 100))
    assert MAX_STEPS - 2 * STEPS_A_PIECE <= len(history.steps(1e9)) <= MAX_STEPS


def test_a_request_is_remembered_without_its_prompt():
    history, prompt = History("fcfs"), tuple(range(1000, 3000))
    before = sys.getrefcount(prompt)
    request = make_request("a", [1])
    history.accepted(dataclasses.replace(request, prompt_token_ids=prompt), None)
    (request_record,) = history.find("a")
    assert request_record.prompt_tokens == 2000
    assert sys.getrefcount(prompt) == before


def test_the_trace_has_each_step_its_parts_and_each_request():
    history = History("fcfs")
    accepted = history.accepted(make_request("a", [1]), None)
    accepted.progressed(1.0, 1, None)
    accepted.progressed(3.0, 1, "length")
    trace = chrome_trace([record(0.5, chunks=[("a", 4)]), record(1.5)], history.records())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in slices[:4]] == ["4 tokens of 2", "schedule", "execute", "update"]
    assert slices[0]["ts"] == 500_000
    assert round(slices[3]["ts"]) == 1_300_000
    assert slices[0]["args"]["chunks"] == ["a: 4"]
    spans = [(event["ph"], event["name"], event["ts"]) for event in trace["traceEvents"] if event["ph"] in "be"]
    assert spans == [
        ("b", "until the first token", 0.0),
        ("e", "until the first token", 1e6),
        ("b", "answer", 1e6),
        ("e", "answer", 3e6),
    ]


def test_the_newest_steps_are_found_by_their_number_also_across_pieces():
    history = History("fcfs")
    for began in range(2 * STEPS_A_PIECE + 50):
        history.record_step(record(float(began)))
    assert history.num_steps == 2 * STEPS_A_PIECE + 50
    for count in (0, 1, 50, 51, STEPS_A_PIECE + 50, 2 * STEPS_A_PIECE + 50):
        first = history.num_steps - count
        assert [step.began for step in history.newest_steps(count)] == [
            float(n) for n in range(first, history.num_steps)
        ]
    assert len(history.newest_steps(10**6)) == history.num_steps
