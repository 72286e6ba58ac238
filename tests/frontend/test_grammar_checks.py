"""Whose grammar is checked next, and what waits for that."""

import asyncio
import gc
import time
from concurrent.futures import Future

import pytest

from penstock.api.sampling_params import Structured
from penstock.checkpoint.checkpoint import resolve_path
from penstock.errors import InvalidRequestError, OverloadedError, ShuttingDownError
from penstock.frontend.grammar_checks import GrammarChecks
from penstock.structured.grammar_validator import GrammarValidator
from penstock.text.tokenizer import Tokenizer
from tests.support.schemas import slow_schema

SIZE = Tokenizer.from_path(resolve_path(None)).vocab_size
QUICK = [Structured.choice([f"yes {i}", "no"]) for i in range(3)]


def slow(seed, parts=3):
    return Structured.json_schema(slow_schema(seed, parts))


def run(talk, **options):
    async def main():
        checks = GrammarChecks(GrammarValidator(str(resolve_path(None)), SIZE), **options)
        try:
            await checks.check(Structured.json_object(), "")  # the worker has started
            await asyncio.wait_for(talk(checks), 60)
        finally:
            await checks.close()

    asyncio.run(main())


def test_tenants_take_turns():
    ended = []

    async def check(checks, structured, tenant):
        await checks.check(structured, tenant)
        ended.append(tenant)

    async def talk(checks):
        calls = [asyncio.ensure_future(check(checks, slow(i), "a")) for i in range(6)]
        await asyncio.sleep(0)
        await asyncio.gather(*calls, *(check(checks, form, "b") for form in QUICK))

    run(talk)
    assert ended == ["a", "a", "b", "a", "b", "a", "b", "a", "a"]  # the second had waited before there was a "b"


def test_a_check_that_nobody_waits_for_is_dropped():
    async def talk(checks):
        begin = time.monotonic()
        await checks.check(slow(0), "a")
        one = time.monotonic() - begin
        calls = [asyncio.ensure_future(checks.check(slow(i), "a")) for i in range(1, 40)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        begin = time.monotonic()
        await checks.check(QUICK[0], "a")
        assert time.monotonic() - begin < 10 * one  # 39 times, when each was checked

    run(talk)


def test_a_caller_that_leaves_does_not_let_the_next_begin_early():
    async def talk(checks):
        first = asyncio.ensure_future(checks.check(slow(0), "a"))
        await asyncio.sleep(0.05)
        first.cancel()
        second = asyncio.ensure_future(checks.check(QUICK[0], "a"))
        await asyncio.sleep(0)
        assert not second.done()
        await second
        assert checks._validator.knows(slow(0))

    run(talk)


def test_equal_grammars_are_checked_once():
    async def talk(checks):
        begin = time.monotonic()
        await checks.check(slow(0), "a")
        one = time.monotonic() - begin
        begin = time.monotonic()
        await asyncio.gather(*(checks.check(slow(1), tenant) for tenant in "ab" * 20))
        assert time.monotonic() - begin < 10 * one

    run(talk)


def test_waiting_grammars_have_room_for_so_many_characters_of_one_tenant_and_of_all():
    async def talk(checks):
        calls = [asyncio.ensure_future(checks.check(slow(i), "a")) for i in range(7)]
        await asyncio.sleep(0)
        assert checks._room.held > 5 * slow(0).num_characters
        with pytest.raises(OverloadedError, match="wait to be checked"):
            await checks.check(slow(7), "a")
        await checks.check(QUICK[0], "b")
        await asyncio.gather(*calls)
        assert checks._room.held == 0

    run(talk, max_characters=8 * slow(0).num_characters)


def test_a_grammar_that_is_too_large_is_refused_without_a_turn():
    async def talk(checks):
        waiting = asyncio.ensure_future(checks.check(slow(0), "a"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="at most 524288"):
            await checks.check(Structured("json_object", calls="x" * 600_000), "a")
        assert not waiting.done()
        await waiting

    run(talk)


def test_closing_refuses_the_checks_that_wait():
    async def talk(checks):
        calls = [asyncio.ensure_future(checks.check(slow(i, 38), "a")) for i in range(5)]
        await asyncio.sleep(0.1)
        await checks.close()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, ShuttingDownError) for error in errors[1:])
        with pytest.raises(ShuttingDownError):
            await checks.check(QUICK[0], "a")

    run(talk)


class ToldValidator:
    """A validator whose results the test sets."""

    def __init__(self):
        self.future = Future()

    def knows(self, structured):
        return False

    def submit(self, structured):
        return self.future

    def close(self):
        pass


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_refusal_that_comes_after_its_caller_has_left_is_not_logged(num_steps):
    logged = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        validator = ToldValidator()
        checks = GrammarChecks(validator)
        call = asyncio.ensure_future(checks.check(QUICK[0], "a"))
        for _ in range(3):
            await asyncio.sleep(0)
        call.cancel()
        for _ in range(num_steps):
            await asyncio.sleep(0)
        validator.future.set_exception(InvalidRequestError("refused"))
        await asyncio.sleep(0.01)
        await asyncio.gather(call, return_exceptions=True)
        await checks.close()

    asyncio.run(main())
    gc.collect()
    assert logged == []
