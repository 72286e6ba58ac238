"""The engine as the event loop sees it, with a real engine process that runs a rule instead of a model."""

import asyncio
import os
import signal
import sys
import tempfile
import time

import pytest

from penstock.api.request import FinishReason
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    QuarantinedError,
    ShuttingDownError,
)
from penstock.fleet import engine_process
from penstock.fleet.link import EngineLink
from penstock.fleet.replica import DEFAULT_RESTARTS, PING_SECONDS, RestartPolicy
from penstock.frontend.client import AsyncEngine
from tests.engine.rule_core import BLOCKS, CRASH, HANG, RULE_CORE, SLOW

UNTIL_SECONDS = 0.005


def with_engine(talk, model, step_deadline=30.0, restarts=DEFAULT_RESTARTS, **options):
    """Run `talk(engine)` against a fresh, started engine and leave nothing behind."""

    async def run():
        config = EngineConfig.from_options(model=str(model), **options)
        engine = await AsyncEngine.start(config, EngineLink(config, RULE_CORE), step_deadline, restarts=restarts)
        try:
            return await asyncio.wait_for(talk(engine), 120)
        finally:
            await engine.close()

    return asyncio.run(run())


def open_one(engine, *prompt, stream=True, request_id="a", **params):
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0} | params)
    return engine.open([engine.accept_request(prompt, params, request_id=request_id)], stream=stream)


async def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(UNTIL_SECONDS)


def blocks(engine):
    return engine.metrics.kv_blocks.values


def test_a_generation_streams_what_its_results_hold(tmp_path):
    async def talk(engine):
        tokens = []
        with open_one(engine, 10, n=2) as request_stream:
            async for deltas in request_stream:
                tokens += [(delta.index, token) for _, delta in deltas for token in delta.token_ids]
        with open_one(engine, 10, n=2, stream=False) as request_stream:
            (result,) = await request_stream.results()
        assert sorted(tokens) == [(i, t) for i in range(2) for t in (11, 12, 13, 14)]
        assert [answer.token_ids for answer in result.outputs] == [[11, 12, 13, 14]] * 2
        assert result.finished
        times = result.times
        assert times.arrival <= times.first_scheduled <= times.first_token <= times.finished

    with_engine(talk, tmp_path)


def test_the_requests_of_one_call_are_told_apart_by_their_position(tmp_path):
    async def talk(engine):
        params = SamplingParams(max_tokens=3)
        accepted = [engine.accept_request([start], params, request_id=f"r{start}") for start in (100, 200)]
        tokens = {0: [], 1: []}
        with engine.open(accepted, stream=True) as request_stream:
            async for deltas in request_stream:
                for position, delta in deltas:
                    tokens[position] += delta.token_ids
        assert tokens == {0: [101, 102, 103], 1: [201, 202, 203]}

    with_engine(talk, tmp_path)


def test_a_consumer_that_comes_late_finds_all_in_one_piece(tmp_path):
    async def talk(engine):
        with open_one(engine, 10, max_tokens=50) as request_stream:
            await until(lambda: not request_stream.running)
            deltas = await request_stream.__anext__()
            assert len(deltas) == 50

    with_engine(talk, tmp_path)


@pytest.mark.parametrize("how", ["leave", "cancel", "abort"])
def test_a_consumer_that_goes_away_ends_the_request_within_a_step(tmp_path, how):
    async def talk(engine):
        begun = asyncio.Event()

        async def consume():
            with open_one(engine, SLOW, max_tokens=400) as request_stream:
                async for _ in request_stream:
                    begun.set()
                    if how == "leave":
                        return
                    if how == "abort":
                        request_stream.abort()

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
        request_stream = open_one(engine, SLOW, n=2, max_tokens=400)
        await request_stream.__anext__()
        request_stream.abort()
        request_stream.abort()
        deltas = [delta async for batch in request_stream for _, delta in batch]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.ABORT] * 2
        assert (await request_stream.results())[0].finished

    with_engine(talk, tmp_path)


async def drain(request_stream):
    return [delta async for deltas in request_stream for _, delta in deltas]


async def two_steps(request_stream):
    """Read tokens of two steps, so that its request is under no suspicion."""
    steps = 0
    while steps < 2:
        steps += sum(bool(delta.token_ids) for _, delta in await request_stream.__anext__())


def tokens_of(deltas, index=0):
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def kill(engine, number=signal.SIGKILL):
    os.kill(engine.pid, number)


def restarts(engine):
    return engine.metrics.restarts.values.get("", 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_open_requests_go_on_where_they_were_when_the_engine_dies(tmp_path, capfd, number):
    async def talk(engine):
        streamed = open_one(engine, SLOW, n=2, request_id="s", logprobs=0, max_tokens=25)
        awaited = open_one(engine, SLOW, request_id="w", stream=False, max_tokens=25)
        seen = list(await streamed.__anext__())
        kill(engine, number)
        await until(lambda: restarts(engine) == 1)
        seen += [(0, delta) for delta in await drain(streamed)]
        (result,) = await awaited.results()
        expected = [(SLOW + 1 + i) % 1000 for i in range(25)]
        assert [tokens_of([d for _, d in seen], index) for index in range(2)] == [expected, expected]
        assert sum(len(delta.logprobs) for _, delta in seen) == 50
        assert result.outputs[0].token_ids == expected
        assert engine.metrics.success.values["length"] == 3
        assert engine.metrics.generation_tokens.values[""] == 75
        assert await engine.health_error() is None

    with_engine(talk, tmp_path)


def test_an_engine_that_stands_still_for_a_moment_only_is_not_replaced(tmp_path):
    """As when all processes of a service are stopped and continued, and the engine is the last to go on."""

    async def talk(engine):
        streamed = open_one(engine, SLOW, max_tokens=40)
        await streamed.__anext__()
        for _ in range(3):
            kill(engine, signal.SIGSTOP)
            await asyncio.sleep(engine_process.STOPPED_SECONDS / 10)
            kill(engine, signal.SIGCONT)
            await asyncio.sleep(1.5 * engine_process.STOPPED_SECONDS)
        assert len(tokens_of(await drain(streamed))) >= 38
        assert restarts(engine) == 0
        kill(engine, signal.SIGSTOP)
        await until(lambda: restarts(engine) == 1)

    with_engine(talk, tmp_path)


def test_a_request_that_comes_while_there_is_no_engine_waits_for_the_next_one(tmp_path):
    async def talk(engine):
        kill(engine)
        await until(lambda: engine.restarting)
        request_stream = open_one(engine, 10)
        aborted = open_one(engine, 10, request_id="b")
        aborted.abort()
        assert "restarted" in await engine.health_error()
        assert tokens_of(await drain(request_stream)) == [11, 12, 13, 14]
        assert [delta.finish_reason for delta in await drain(aborted)] == [FinishReason.ABORT]

    with_engine(talk, tmp_path)


def test_a_request_that_kills_the_engine_twice_is_ended_and_not_taken_again_and_the_rest_go_on(tmp_path, capfd):
    async def talk(engine):
        others = [open_one(engine, SLOW, request_id=str(i), max_tokens=40) for i in range(2)]
        await asyncio.gather(*(two_steps(other) for other in others))
        (end,) = await drain(open_one(engine, CRASH, request_id="poison"))
        assert end.finish_reason is FinishReason.ERROR
        assert "a step fell over" in end.error
        assert restarts(engine) == 2
        with pytest.raises(QuarantinedError):
            open_one(engine, CRASH, request_id="again", seed=5)
        for other in others:
            deltas = await drain(other)
            assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert restarts(engine) == 2

    with_engine(talk, tmp_path)
    assert "RuntimeError: a step fell over" in capfd.readouterr().err


def test_of_several_that_may_be_to_blame_only_the_guilty_one_is_ended(tmp_path, capfd):
    async def talk(engine):
        params = SamplingParams(max_tokens=5)
        starts = [SLOW, CRASH, 20, 30]  # the others come while the first one's step lasts
        calls = engine.open([engine.accept_request([s], params, request_id=f"r{s}") for s in starts], stream=False)
        results = await calls.results()
        reasons = [result.outputs[0].finish_reason for result in results]
        assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
        assert results[3].outputs[0].token_ids == [31, 32, 33, 34, 35]
        assert restarts(engine) == 3  # together, and twice alone

    with_engine(talk, tmp_path)


def test_a_step_that_never_ends_is_noticed_and_the_rest_go_on(tmp_path):
    async def talk(engine):
        other = open_one(engine, SLOW, max_tokens=40)
        await two_steps(other)
        (end,) = await drain(open_one(engine, HANG, request_id="poison"))
        assert end.finish_reason is FinishReason.ERROR
        assert "no step for" in end.error
        assert (await drain(other))[-1].finish_reason is FinishReason.LENGTH

    with_engine(talk, tmp_path, step_deadline=0.4)


def test_an_idle_engine_that_stands_still_is_replaced(tmp_path):
    async def talk(engine):
        first = engine.pid
        assert await engine.health_error() is None
        kill(engine, signal.SIGSTOP)
        await until(lambda: engine.restarting)
        assert "was stopped" in await engine.health_error()
        await until(lambda: not engine.restarting)
        assert engine.pid != first
        assert await engine.health_error() is None
        assert tokens_of(await drain(open_one(engine, 10))) == [11, 12, 13, 14]

    with_engine(talk, tmp_path)


def test_an_idle_engine_is_not_blamed_for_a_delay_of_the_event_loop(tmp_path, monkeypatch):
    """As when another thread decodes a huge body, after the loop has polled and before it sees which timers are due."""

    async def talk(engine):
        selector = asyncio.get_running_loop()._selector
        polled = selector.select

        def delayed(timeout):
            if timeout == 0:
                return polled(0)
            monkeypatch.undo()
            events = polled(0)
            time.sleep(1.2 * PING_SECONDS)
            return events

        asked = asyncio.ensure_future(engine.health_error())
        asyncio.get_running_loop().call_soon(monkeypatch.setattr, selector, "select", delayed)
        assert await asked is None

    with_engine(talk, tmp_path)


def test_an_engine_in_the_step_of_an_aborted_request_may_take_as_long_as_any_step(tmp_path):
    async def talk(engine):
        aborted = open_one(engine, HANG)
        await until(lambda: engine.fleet.replicas[0]._link.in_flight.num_tokens())
        aborted.abort()
        assert await engine.health_error() is None
        assert "does not answer" in await engine.health_error()
        kill(engine)

    with_engine(talk, tmp_path, step_deadline=1.5 * PING_SECONDS)


def test_an_engine_that_cannot_be_started_again_is_given_up_and_every_waiter_is_told(tmp_path, capfd):
    marker = tmp_path / "out-of-order"

    async def talk(engine):
        waiting = open_one(engine, SLOW, max_tokens=400)
        marker.touch()
        kill(engine)
        with pytest.raises(EngineDeadError, match="cannot be started again"):
            await drain(waiting)
        assert engine.given_up.is_set()
        assert "cannot be started" in await engine.health_error()
        with pytest.raises(EngineDeadError):
            open_one(engine, 1, request_id="b")

    with_engine(talk, tmp_path, restarts=RestartPolicy(first_pause=0.0, max_failed_starts=2))


def test_an_engine_that_cannot_be_launched_for_a_while_is_tried_again(tmp_path, monkeypatch, caplog):
    async def talk(engine):
        waiting = open_one(engine, SLOW, max_tokens=20)
        await waiting.__anext__()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "nothing"))  # as while Python is being upgraded
            kill(engine)
            await until(lambda: "did not start" in caplog.text)
        assert (await drain(waiting))[-1].finish_reason is FinishReason.LENGTH

    with_engine(talk, tmp_path, restarts=RestartPolicy(first_pause=0.01))


def test_an_engine_starts_without_room_for_temporary_files(tmp_path, monkeypatch):
    async def talk(engine):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
        kill(engine)
        await until(lambda: restarts(engine) == 1 and not engine.restarting)
        assert tokens_of(await drain(open_one(engine, 10))) == [11, 12, 13, 14]

    with_engine(talk, tmp_path)


def test_restarts_that_bring_nothing_are_further_and_further_apart(tmp_path):
    pauses = []

    class Recorded(RestartPolicy):
        def pause(self, num_failures):
            pauses.append(RestartPolicy.pause(self, num_failures))
            return pauses[-1]

    async def talk(engine):
        async def restart():
            count = restarts(engine)
            kill(engine)
            await until(lambda: restarts(engine) > count and not engine.restarting)

        for _ in range(3):
            await restart()
        assert pauses == [0.7, 1.4]
        await drain(open_one(engine, 10))
        await restart()
        assert pauses == [0.7, 1.4], "a token, and the slate is clean"

    with_engine(talk, tmp_path, restarts=Recorded(first_pause=0.7))


def test_requests_that_a_restarted_engine_cannot_hold_fail_alone(tmp_path):
    async def talk(engine):
        long = open_one(engine, SLOW, request_id="long", max_tokens=400)
        short = open_one(engine, SLOW, request_id="short", max_tokens=60)
        (tmp_path / "shrunk").touch()
        kill(engine)
        assert (await drain(long))[-1].finish_reason is FinishReason.ERROR
        assert (await drain(short))[-1].finish_reason is FinishReason.LENGTH
        lowered = open_one(engine, 1, max_tokens=400)
        assert (await drain(lowered))[-1].finish_reason is FinishReason.LENGTH

    with_engine(talk, tmp_path)


def test_a_defect_in_what_reads_one_request_ends_that_one_alone(tmp_path, caplog):
    async def talk(engine):
        broken, other = open_one(engine, SLOW, max_tokens=30), open_one(engine, SLOW, request_id="b", max_tokens=30)

        def fail(output, now):
            raise RuntimeError("a defect")

        engine.open_requests.find("a").output_processor.process_output = fail
        with pytest.raises(EngineError, match="its log has the details"):
            await drain(broken)
        assert (await drain(other))[-1].finish_reason is FinishReason.LENGTH
        assert restarts(engine) == 0

    with_engine(talk, tmp_path)
    assert "a defect" in caplog.text


def test_a_drained_server_ends_what_is_open_and_takes_nothing_new(tmp_path):
    async def talk(engine):
        short, long = open_one(engine, SLOW, max_tokens=5), open_one(engine, SLOW, request_id="b", max_tokens=400)
        engine.refuse(ShuttingDownError("closing time"))
        with pytest.raises(ShuttingDownError, match="closing time"):
            open_one(engine, 1, request_id="c")
        assert (await drain(short))[-1].finish_reason is FinishReason.LENGTH
        drained = asyncio.ensure_future(engine.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        engine.abort_all("closing time")
        await drained
        assert (await drain(long))[-1].error == "closing time"

    with_engine(talk, tmp_path)


def test_a_server_that_closes_at_once_tells_whoever_waits(tmp_path):
    async def talk(engine):
        request_stream = open_one(engine, SLOW, max_tokens=400)
        engine.fail_all(EngineDeadError("closing time"))
        with pytest.raises(EngineDeadError, match="closing time"):
            await request_stream.results()
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
                engine.accept_request(prompt, SamplingParams(), request_id="a", **options)
        with pytest.raises(InvalidRequestError, match="without a tokenizer"):
            await engine.prompts.encode("text")

    with_engine(talk, tmp_path, policy="fcfs")


def test_a_priority_is_taken_where_the_policy_heeds_it(tmp_path):
    async def talk(engine):
        assert engine.accept_request([1], SamplingParams(), request_id="a", priority=-2).request.priority == -2

    with_engine(talk, tmp_path, policy="priority")
