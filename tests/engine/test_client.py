"""The engine as the event loop sees it, with a real engine process that runs a rule instead of a model."""

import asyncio
import os
import signal
import time

import pytest

from penstock.config import EngineConfig
from penstock.engine.client import AsyncEngine
from penstock.engine.link import EngineLink
from penstock.errors import ConfigError, EngineDeadError, InvalidRequestError, PromptTooLongError
from penstock.request import FinishReason, SamplingParams
from tests.engine.rule_core import BLOCKS, CRASH, HANG, RULE_CORE, SLOW


def with_engine(talk, model, **options):
    """Run `talk(engine)` against a fresh, started engine and leave nothing behind."""

    async def run():
        config = EngineConfig.from_options(model=str(model), **options)
        engine = AsyncEngine(config, EngineLink(config, RULE_CORE))
        try:
            await engine.start()
            return await asyncio.wait_for(talk(engine), 30)
        finally:
            await engine.close()

    return asyncio.run(run())


def open_one(engine, *prompt, stream=True, request_id="a", **params):
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0} | params)
    return engine.open([engine.accept(prompt, params, request_id=request_id)], stream=stream)


async def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.005)


def blocks(engine):
    return engine.metrics.kv_blocks.values


def test_a_generation_streams_what_its_results_hold(tmp_path):
    async def talk(engine):
        tokens = []
        with open_one(engine, 10, n=2) as generation:
            async for deltas in generation:
                tokens += [(delta.index, token) for _, delta in deltas for token in delta.token_ids]
        with open_one(engine, 10, n=2, stream=False) as generation:
            (result,) = await generation.results()
        assert sorted(tokens) == [(i, t) for i in range(2) for t in (11, 12, 13, 14)]
        assert [answer.token_ids for answer in result.outputs] == [[11, 12, 13, 14]] * 2
        assert result.finished
        times = result.times
        assert times.arrival <= times.first_scheduled <= times.first_token <= times.finished

    with_engine(talk, tmp_path)


def test_the_requests_of_one_call_are_told_apart_by_their_position(tmp_path):
    async def talk(engine):
        params = SamplingParams(max_tokens=3)
        accepted = [engine.accept([start], params, request_id=f"r{start}") for start in (100, 200)]
        tokens = {0: [], 1: []}
        with engine.open(accepted, stream=True) as generation:
            async for deltas in generation:
                for position, delta in deltas:
                    tokens[position] += delta.token_ids
        assert tokens == {0: [101, 102, 103], 1: [201, 202, 203]}

    with_engine(talk, tmp_path)


def test_a_consumer_that_comes_late_finds_all_in_one_piece(tmp_path):
    async def talk(engine):
        with open_one(engine, 10, max_tokens=50) as generation:
            await until(lambda: not generation.running)
            deltas = await generation.__anext__()
            assert len(deltas) == 50

    with_engine(talk, tmp_path)


@pytest.mark.parametrize("how", ["leave", "cancel", "abort"])
def test_a_consumer_that_goes_away_ends_the_request_within_a_step(tmp_path, how):
    async def talk(engine):
        begun = asyncio.Event()

        async def consume():
            with open_one(engine, SLOW, max_tokens=400) as generation:
                async for _ in generation:
                    begun.set()
                    if how == "leave":
                        return
                    if how == "abort":
                        generation.abort()

        consumer = asyncio.ensure_future(consume())
        await begun.wait()
        steps = engine.metrics.steps.values[""]
        if how == "cancel":
            consumer.cancel()
        await asyncio.wait({consumer})
        await until(lambda: blocks(engine)["free"] == BLOCKS)
        assert engine.metrics.steps.values[""] - steps <= 2  # the one that ran, the one that told of the end
        assert engine.metrics.success.values == {"stop": 0, "length": 0, "abort": 1, "error": 0}

    with_engine(talk, tmp_path)


def test_an_aborted_generation_ends_once_and_for_all(tmp_path):
    async def talk(engine):
        generation = open_one(engine, SLOW, n=2, max_tokens=400)
        await generation.__anext__()
        generation.abort()
        generation.abort()
        deltas = [delta async for batch in generation for _, delta in batch]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.ABORT] * 2
        assert (await generation.results())[0].finished

    with_engine(talk, tmp_path)


def test_every_waiter_is_told_when_the_engine_dies(tmp_path, capfd):
    async def talk(engine):
        waiting = [open_one(engine, SLOW, request_id=str(i), stream=bool(i), max_tokens=400) for i in range(3)]
        readers = [asyncio.ensure_future(waiting[0].results())]
        readers += [asyncio.ensure_future(drain(generation)) for generation in waiting[1:]]
        open_one(engine, CRASH, request_id="poison")
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError)
            assert "a step fell over" in str(outcome)
        with pytest.raises(EngineDeadError):
            open_one(engine, 1)
        assert "a step fell over" in await engine.check_health(1.0)

    with_engine(talk, tmp_path)
    assert "RuntimeError: a step fell over" in capfd.readouterr().err


async def drain(generation):
    async for _ in generation:
        pass


def test_an_engine_that_is_killed_is_noticed_at_once(tmp_path):
    async def talk(engine):
        generation = open_one(engine, SLOW, max_tokens=400)
        await generation.__anext__()
        os.kill(engine.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            await drain(generation)
        assert time.monotonic() - killed < 2

    with_engine(talk, tmp_path)


def test_health_is_progress(tmp_path):
    async def talk(engine):
        assert await engine.check_health(0.5) is None
        with open_one(engine, SLOW, max_tokens=400) as generation:
            await generation.__anext__()
            assert await engine.check_health(0.5) is None
        await until(lambda: blocks(engine)["free"] == BLOCKS)
        with open_one(engine, HANG):
            await asyncio.sleep(0.3)
            assert "no step for" in await engine.check_health(0.2)
        assert "does not answer" in await engine.check_health(0.2)
        os.kill(engine.pid, signal.SIGKILL)

    with_engine(talk, tmp_path)


def test_a_server_that_stops_serving_ends_what_is_open_with_its_reason(tmp_path):
    async def talk(engine):
        generation = open_one(engine, SLOW, max_tokens=400)
        engine.refuse("closing time")
        with pytest.raises(EngineDeadError, match="closing time"):
            await generation.results()
        with pytest.raises(EngineDeadError, match="closing time"):
            open_one(engine, 1, request_id="b")

    with_engine(talk, tmp_path)


@pytest.mark.parametrize(("model", "error"), [("no-such-folder", ConfigError), ("out-of-order", EngineDeadError)])
def test_an_engine_that_cannot_start_says_why(tmp_path, monkeypatch, model, error, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out-of-order").mkdir()
    with pytest.raises(error, match=r"no-such-folder|fell over"):
        with_engine(None, model)


def test_what_cannot_be_served_is_refused_before_the_engine_hears_of_it(tmp_path):
    async def talk(engine):
        for error, prompt, options in (
            (InvalidRequestError, [], {}),
            (InvalidRequestError, [1000], {}),
            (PromptTooLongError, [1] * 512, {}),
            (InvalidRequestError, [1], {"priority": 1}),
        ):
            with pytest.raises(error):
                engine.accept(prompt, SamplingParams(), request_id="a", **options)
        with pytest.raises(InvalidRequestError, match="without a tokenizer"):
            await engine.encode("text")

    with_engine(talk, tmp_path, policy="fcfs")


def test_a_priority_is_taken_where_the_policy_heeds_it(tmp_path):
    async def talk(engine):
        assert engine.accept([1], SamplingParams(), request_id="a", priority=-2).request.priority == -2

    with_engine(talk, tmp_path, policy="priority")
