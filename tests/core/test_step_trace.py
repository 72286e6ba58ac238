"""What a step did to whom, and what kept the head of the queue waiting."""

from penstock.core.policies import TgiAdmission
from penstock.core.scheduler import Scheduler
from tests.core.fakes import FakeRunner, make_request, make_scheduler, run_step


def play(scheduler: Scheduler, num_blocks: int = 16) -> list:
    runner, accounts = FakeRunner(num_blocks, 4), []
    while scheduler.has_work:
        run_step(scheduler, runner)
        accounts.append(scheduler.trace)
    return accounts


def add(scheduler: Scheduler, *names: str, prompt: int = 3, max_tokens: int = 3) -> None:
    for i, name in enumerate(names):
        scheduler.add_request(make_request(name, [i + 1] * prompt, max_tokens, stop_token_ids=()))


def test_admissions_chunks_and_tokens_are_told() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, "a", prompt=10, max_tokens=2)
    first, second, third = play(scheduler)
    assert (first.admitted, first.chunks, first.num_tokens, first.blocked) == ([("a", 0)], [("a", 8)], 8, None)
    assert (second.admitted, second.chunks) == ([], [("a", 2)])
    assert (third.chunks, third.num_tokens, third.num_sequences) == ([], 1, 1)


def test_hits_in_the_prefix_cache_are_told_with_the_admission() -> None:
    scheduler = make_scheduler(budget=16)
    runner = FakeRunner(16, 4)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, [1] * 9, 1))
        run_step(scheduler, runner)
    assert scheduler.trace.admitted == [("b", 8)]


def test_the_head_of_the_queue_is_told_what_it_waits_for() -> None:
    slots = make_scheduler(max_num_seqs=1)
    add(slots, "a", "b", "c")
    assert play(slots)[0].blocked == ("b", "slots")

    budget = make_scheduler(budget=4)
    add(budget, "a", "b", prompt=5)
    assert play(budget)[0].blocked == ("b", "budget")

    blocks = make_scheduler(num_blocks=3)
    add(blocks, "a", "b", prompt=8, max_tokens=2)
    assert play(blocks, 3)[0].blocked == ("b", "blocks")

    admission = TgiAdmission(
        block_size=4,
        max_batch_prefill_tokens=None,
        max_batch_total_tokens=10,
        waiting_served_ratio=0.0,
        max_waiting_tokens=9,
    )
    tgi = make_scheduler(admission=admission)
    add(tgi, "a", "b", prompt=4)
    assert play(tgi)[0].blocked == ("b", "admission")


def test_preemptions_are_told_and_nobody_joins_in_their_step() -> None:
    scheduler = make_scheduler(num_blocks=5, max_num_seqs=3)
    add(scheduler, "a", "b", "c", prompt=4, max_tokens=12)
    accounts = play(scheduler, 5)
    told = [trace for trace in accounts if trace.preempted]
    assert told
    for trace in told:
        assert trace.blocked is not None
        assert trace.blocked[1] == "preemption"
        assert not trace.admitted
    assert sum(len(trace.preempted) for trace in accounts) == scheduler.num_preemptions
