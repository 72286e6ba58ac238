"""What may be open, queued and spent, counted by hand."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.request import Image
from penstock.errors import ConfigError, InvalidRequestError, OverloadedError, PromptTooLongError, RateLimitError
from penstock.frontend.limits import ANYONE, Admission, Caller, QueueLimits, SharedLimit
from tests.core.fakes import make_request


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Purse:
    def __init__(self, left):
        self.left = left

    def check(self, num_tokens):
        if num_tokens > self.left:
            raise RateLimitError("spent", 7.0)

    def spend(self, num_tokens):
        self.left -= num_tokens


def with_admission(play, max_num_seqs=2, clock=None, **limits):
    async def run():
        expired = []
        admission = Admission(QueueLimits(**limits), max_num_seqs, expired.append, clock or Clock())
        await play(admission, expired)

    asyncio.run(run())


def enter(admission, *names, prompt=3, n=1, caller=ANYONE, timeout=None):
    return admission.enter([make_request(name, [1] * prompt, n=n) for name in names], caller, timeout)


def test_as_many_answers_may_be_open_as_run_and_may_wait_together():
    async def play(admission, expired):
        (first,) = enter(admission, "a", n=2)
        (second,) = enter(admission, "b")
        with pytest.raises(OverloadedError, match="3 answers run or wait, of at most 3") as refused:
            enter(admission, "c")
        assert refused.value.retry_after >= 1
        assert admission.num_open == 3
        admission.left(second)
        enter(admission, "c")
        admission.left(first)
        assert admission.num_open == 1

    with_admission(play, max_queued=1)


def test_images_of_open_requests_stay_within_the_bytes_that_the_memory_plan_has_for_them():
    async def play(admission, expired):
        def enter_image(name, size, caller=ANYONE, *, is_sound=False):
            image = Image(0, 1, 1, 1, 1, 1, bytes(32), bytes(size), is_sound)
            return admission.enter([replace(make_request(name, [1] * 3), images=(image,))], caller, None)

        admission.resize(8, 100)
        (first,) = enter_image("a", 60, Caller("loud"))
        with pytest.raises(OverloadedError, match="take 60 bytes as pixels; the memory plan has 100"):
            enter_image("b", 41)
        with pytest.raises(InvalidRequestError, match="send fewer or smaller images"):
            enter_image("b", 101)
        with pytest.raises(OverloadedError, match="the sounds of open requests take 60 bytes as features"):
            enter_image("b", 41, is_sound=True)
        with pytest.raises(InvalidRequestError, match="send fewer or shorter sounds"):
            enter_image("b", 101, is_sound=True)
        picture = Image(0, 1, 1, 1, 1, 1, bytes(32), bytes(90))
        both = replace(make_request("b", [1] * 3), images=(picture, replace(picture, start=1, is_sound=True)))
        with pytest.raises(InvalidRequestError, match="images and sounds take 180 bytes as pixels or features"):
            admission.enter([both], ANYONE, None)
        enter(admission, "text", caller=Caller("loud"))
        admission.left(first)
        enter_image("c", 100)
        admission.resize(8, 0)  # an engine on a GPU
        enter_image("d", 1000)

    with_admission(play, max_queued=8)


def test_no_key_takes_so_much_that_nothing_is_left_for_the_others():
    async def play(admission, expired):
        loud, quiet = Caller("loud"), Caller("quiet")
        for i in range(8):
            enter(admission, f"l{i}", caller=loud)
        with pytest.raises(OverloadedError, match="one API key may not take all"):
            enter(admission, "l8", caller=loud)
        (first,) = enter(admission, "q0", caller=quiet)
        with pytest.raises(OverloadedError):
            enter(admission, "q1", caller=quiet)
        admission.left(first)
        enter(admission, "q1", caller=quiet)

    with_admission(play, max_num_seqs=4, max_queued=6)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 9)), max_size=60))
def test_a_shared_limit_is_never_passed_and_gives_back_all(asked):
    limit, taken = SharedLimit(20), []
    for name, amount in asked:
        if limit.fits(amount, name):
            limit.take(amount, name)
            taken.append((amount, name))
        assert limit.held == sum(amount for amount, _ in taken) <= 20
    for amount, name in taken:
        limit.take(-amount, name)
    assert limit.held == 0
    assert limit.fits(20, "a")


def test_a_call_enters_whole_or_not_at_all():
    async def play(admission, expired):
        with pytest.raises(InvalidRequestError, match="asks for 4 answers; at most 3 may"):
            enter(admission, "a", "b", "c", "d")
        enter(admission, "a")
        with pytest.raises(OverloadedError):
            enter(admission, "b", "c", "d")
        assert admission.num_open == 1
        assert admission.tokens_waiting == 3

    with_admission(play, max_queued=1)


def test_prompt_tokens_that_wait_are_bounded_but_one_call_always_may():
    async def play(admission, expired):
        (large,) = enter(admission, "a", prompt=50)
        with pytest.raises(OverloadedError, match="50 prompt tokens wait"):
            enter(admission, "b", prompt=1)
        admission.output(large, 1)
        assert admission.tokens_waiting == 0
        enter(admission, "b", prompt=10)
        admission.left(large)
        assert admission.tokens_waiting == 10

    with_admission(play, max_queued_tokens=20)


def test_a_prompt_beyond_its_limit_is_refused():
    async def play(admission, expired):
        with pytest.raises(PromptTooLongError, match="5 tokens > 4 maximum"):
            enter(admission, "a", prompt=5)
        enter(admission, "a", prompt=4)

    with_admission(play, max_prompt_tokens=4)


def test_a_caller_pays_for_prompts_and_answers_and_only_for_what_was_let_in():
    async def play(admission, expired):
        purse = Purse(10)
        caller = Caller("team", account=purse)
        (one,) = enter(admission, "a", prompt=6, caller=caller)
        admission.output(one, 3)
        assert purse.left == 1
        with pytest.raises(RateLimitError):
            enter(admission, "b", prompt=2, caller=caller)
        assert purse.left == 1
        assert admission.num_open == 1

    with_admission(play)


def test_what_waits_too_long_is_reported_until_it_ends_and_what_has_begun_never():
    async def play(admission, expired):
        slow, quick, short = (
            enter(admission, "slow", timeout=0.02) + enter(admission, "quick", timeout=0.02) + enter(admission, "short")
        )
        admission.output(quick, 1)
        while len(set(expired)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.06)
        assert set(expired) == {"short", "slow"}
        admission.left(slow)
        admission.left(short)
        assert admission.tokens_waiting == 0

    with_admission(play, max_num_seqs=9, queue_timeout=0.04)


def test_retry_after_is_the_time_in_which_the_queue_empties_at_the_pace_of_late():
    clock = Clock()

    async def play(admission, expired):
        waiting = enter(admission, *(f"w{i}" for i in range(20)))
        running = enter(admission, *(f"r{i}" for i in range(60)))
        for one in running:
            admission.output(one, 1)
        for one in running[:50]:
            clock.now += 0.25
            admission.left(one)
        with pytest.raises(OverloadedError) as refused:
            enter(admission, *(f"x{i}" for i in range(80)))
        assert 5 <= refused.value.retry_after < 5.2
        assert len(waiting) == 20

    with_admission(play, max_num_seqs=60, max_queued=20, clock=clock)


def test_a_priority_beyond_the_callers_is_refused():
    caller = Caller(top_priority=2)
    assert caller.default_priority == 2
    caller.check_priority(2)
    with pytest.raises(InvalidRequestError, match="the most urgent that this API key may ask for is 2"):
        caller.check_priority(1)
    ANYONE.check_priority(-1000)
    assert ANYONE.default_priority == Caller(top_priority=-5).default_priority == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_queued": -1},
        {"max_queued_tokens": 0},
        {"max_unread_tokens": 0},
        {"max_prompt_tokens": 0},
        {"queue_timeout": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        QueueLimits(**options)
