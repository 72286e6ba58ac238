"""Back from the journal: what a reader is told again, and what becomes of requests when both processes were killed."""

import asyncio
import contextlib
import os
import signal
import sqlite3
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.request import FinishReason, PromptPart, SequenceOutput, TokenLogprob
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.errors import EngineDeadError, InvalidRequestError, OverloadedError
from penstock.fleet.link import EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.frontend.limits import ANYONE, Caller, QueueLimits
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Record
from penstock.frontend.recovery.replay import catch_up, entries_of, rebuild
from tests.core.images import make_image
from tests.engine.rule_core import RULE_CORE, SLOW
from tests.frontend.test_client import drain, tokens_of, until
from tests.frontend.test_output_processor import EOS, TOKENIZER, ids_of, processor_for

ENDINGS = [None, FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR]


@st.composite
def outputs(draw):
    """What an engine may send for two answers, in pieces."""
    sent = []
    for index in range(2):
        tokens = draw(st.lists(st.sampled_from([*ids_of("abé😀\n"), EOS + 1]), max_size=12))
        ending = draw(st.sampled_from(ENDINGS))
        if ending is FinishReason.STOP:
            tokens.append(EOS)
        while tokens:
            count = draw(st.integers(1, 3))
            piece, tokens = tokens[:count], tokens[count:]
            logprobs = [TokenLogprob(token, -1.0) for token in piece]
            with_piece = not tokens and ending in (FinishReason.LENGTH, FinishReason.STOP)
            sent.append(SequenceOutput("r", index, piece, logprobs, ending if with_piece else None))
        if ending in (FinishReason.ABORT, FinishReason.ERROR):
            error = "it broke" if ending is FinishReason.ERROR else None
            sent.append(SequenceOutput("r", index, [], finish_reason=ending, error=error))
    return sent


@settings(max_examples=200, deadline=None)
@given(outputs=outputs(), cut=st.integers(0, 30))
def test_a_reader_that_is_told_again_hears_what_it_would_have_heard(outputs, cut):
    output_processor = processor_for(n=2, stop=["b\n", "é"], logprobs=0)
    first, rest = outputs[:cut], outputs[cut:]
    told = [delta for delta in (output_processor.process_output(output, 1.0) for output in first) if delta is not None]
    (entry,) = entries_of(
        [(output_processor.request, SamplingParams(n=2, stop=["b\n", "é"], logprobs=0), "Hi")], "m", None
    )
    entry.outputs = list(first)
    assert heard(catch_up(entry, output_processor, TOKENIZER)) == heard(told)
    rebuilt = rebuild(entry, TOKENIZER)
    assert rebuilt.resume_point() == output_processor.resume_point()
    for output in rest:
        assert rebuilt.process_output(output, 2.0) == output_processor.process_output(output, 2.0)
    assert rebuilt.result().outputs == output_processor.result().outputs


def test_a_reader_that_is_told_again_hears_of_the_prompt_first():
    output_processor = processor_for(prompt_logprobs=0, logprobs=0)
    entries = [TokenLogprob(token, -1.0) for token in range(3)]
    sent = [SequenceOutput("r", 0, [], prompt=PromptPart(1, entries[:2]))]
    sent += [SequenceOutput("r", 0, [], prompt=PromptPart(3, entries[2:])), SequenceOutput("r", 0, ids_of("a"))]
    for output in sent:
        output_processor.process_output(output, 1.0)
    params = SamplingParams(prompt_logprobs=0, logprobs=0)
    (entry,) = entries_of([(output_processor.request, params, "Hi")], "m", None)
    first, *rest = catch_up(entry, output_processor, TOKENIZER)
    assert first.prompt_logprobs == entries
    assert [delta.token_ids for delta in rest] == [ids_of("a")]


def heard(deltas):
    """All that was told of each of two answers."""
    return [
        (
            "".join(delta.text for delta in deltas if delta.index == index),
            [token for delta in deltas if delta.index == index for token in delta.token_ids],
            [entry for delta in deltas if delta.index == index for entry in delta.logprobs or ()],
            [(d.finish_reason, d.stop_reason, d.error) for d in deltas if d.index == index and d.finish_reason],
        )
        for index in range(2)
    ]


def test_an_answer_without_tokens_is_told_by_its_ending():
    output_processor = processor_for()
    output_processor.process_output(SequenceOutput("r", 0, [], finish_reason=FinishReason.LENGTH), 1.0)
    (entry,) = entries_of([(output_processor.request, SamplingParams(), None)], "m", None)
    (delta,) = catch_up(entry, output_processor, TOKENIZER)
    assert (delta.finish_reason, delta.token_ids) == (FinishReason.LENGTH, [])
    assert isinstance(rebuild(entry, None), OutputProcessor)


# ── with a real engine process, and servers one after another ────────────────────────────────────────────────────────


def with_servers(folder, *talks, model=None, reconnect_seconds=30.0, limits=None):
    """Run each `talk(engine)` in a server of its own, which is then gone without having ended anything."""

    async def run():
        for number, talk in enumerate(talks):
            path = folder if model is None or not number else model
            config = EngineConfig.from_options(model=str(path))
            engine = await AsyncEngine.start(
                config,
                EngineLink(config, RULE_CORE),
                limits=limits,
                journal=Journal(folder / "journal"),
                reconnect_seconds=reconnect_seconds,
            )
            try:
                await asyncio.wait_for(talk(engine), 120)
            finally:
                engine.fail_all(EngineDeadError("killed"))
                await engine.close()

    asyncio.run(run())


def accept(engine, *prompt, request_id="a", caller=ANYONE, **params):
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0} | params)
    return engine.accept_request(prompt, params, request_id=request_id, caller=caller)


async def opened(engine, *accepted, alias=None):
    """A stream whose requests are in the journal."""
    request_stream = engine.open(accepted, stream=True, alias=alias)
    await engine.journaled_calls.recorded(accepted)
    return request_stream


def test_a_second_server_finishes_what_the_first_one_accepted(tmp_path):
    async def first(engine):
        request_stream = await opened(engine, accept(engine, SLOW, n=2), alias="mine")
        done = engine.open([accept(engine, 10, request_id="done", max_tokens=3)], stream=False)
        await done.results()
        await request_stream.__anext__()

    async def second(engine):
        await until(lambda: not engine.fleet.replicas[0].is_busy)
        ((entry, result),) = await engine.journaled_calls.look_up("mine", "")
        assert entry.call == "a"
        assert [answer.token_ids for answer in result.outputs] == [[(SLOW + 1 + i) % 1000 for i in range(40)]] * 2
        ((_, result),) = await engine.journaled_calls.look_up("done", "")
        assert result.outputs[0].token_ids == [11, 12, 13]
        assert await engine.journaled_calls.look_up("mine", "somebody else") == []

    with_servers(tmp_path, first, second)


def test_restored_requests_count_in_the_limits_of_their_key_but_are_never_refused(tmp_path):
    team = Caller("team")

    async def first(engine):
        for name in "ab":
            await opened(engine, accept(engine, SLOW, request_id=name, caller=team, n=2))

    async def second(engine):
        assert (engine.admission.num_open, engine.admission.tokens_waiting) == (4, 2)
        engine.admission.resize(6, 0)
        with pytest.raises(OverloadedError, match="4 answers run or wait, of at most 6"):
            engine.open([accept(engine, 10, request_id="c", caller=team)], stream=False)
        engine.open([accept(engine, 10, request_id="c", caller=Caller("other"))], stream=False)
        await until(lambda: not engine.fleet.replicas[0].is_busy)
        assert (engine.admission.num_open, engine.admission.tokens_waiting) == (0, 0)
        results = await asyncio.gather(*(engine.journaled_calls.look_up(name, "team") for name in "ab"))
        assert all(len(answer.token_ids) == 40 for ((_, result),) in results for answer in result.outputs)

    with_servers(tmp_path, first, second, limits=QueueLimits(max_queued=0))


def test_a_reader_comes_again_while_the_request_runs_and_after_its_end(tmp_path):
    expected = [(SLOW + 1 + i) % 1000 for i in range(40)]

    async def first(engine):
        left = await opened(engine, accept(engine, SLOW))
        await left.__anext__()
        left.abort()
        again = await engine.journaled_calls.reopen("a", [accept(engine, SLOW, request_id="x")])
        (begin,) = [await again.__anext__()]
        assert tokens_of([delta for _, delta in begin]) + tokens_of(await drain(again)) == expected
        assert engine.metrics.success.values["length"] == 1

    async def second(engine):
        again = await engine.journaled_calls.reopen("a", [accept(engine, SLOW, request_id="y")])
        assert tokens_of(await drain(again)) == expected
        for name, prompt in (("nothing", SLOW), ("a", SLOW - 1)):
            with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
                await engine.journaled_calls.reopen(name, [accept(engine, prompt)])

    with_servers(tmp_path, first, second)


def test_an_answer_about_an_image_goes_on_when_the_engine_and_then_the_server_is_killed(tmp_path):
    expected = [(SLOW + 1 + i + 7) % 1000 for i in range(40)]

    def accept_image(engine, name, number):
        accepted = accept(engine, SLOW, SLOW, request_id=name)
        return replace(accepted, request=replace(accepted.request, images=(make_image(number),)))

    async def first(engine):
        request_stream = await opened(engine, accept_image(engine, "a", 7))
        deltas = [delta for _, delta in await request_stream.__anext__()]
        os.kill(engine.pid, signal.SIGKILL)
        while len(told := tokens_of(deltas)) < 4 or not engine.metrics.restarts.values:
            deltas += [delta for _, delta in await request_stream.__anext__()]
        assert told == expected[: len(told)]
        assert len(told) < 40

    async def second(engine):
        await until(lambda: not engine.fleet.replicas[0].is_busy)
        ((_, result),) = await engine.journaled_calls.look_up("a", "")
        assert result.outputs[0].token_ids == expected
        again = await engine.journaled_calls.reopen("a", [accept_image(engine, "x", 7)])
        assert tokens_of(await drain(again)) == expected
        with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
            await engine.journaled_calls.reopen("a", [accept_image(engine, "y", 8)])

    with_servers(tmp_path, first, second)


def test_a_request_that_nobody_reads_any_more_is_aborted_after_a_while(tmp_path):
    async def first(engine):
        left = await opened(engine, accept(engine, SLOW, max_tokens=400))
        left.abort()
        assert engine.fleet.replicas[0].is_busy
        await until(lambda: engine.metrics.success.values["abort"] == 1)

    async def second(engine):
        assert not engine.fleet.replicas[0].is_busy
        ((_, result),) = await engine.journaled_calls.look_up("a", "")
        assert result.outputs[0].finish_reason is FinishReason.ABORT

    with_servers(tmp_path, first, second, reconnect_seconds=0.2)


def test_another_model_does_not_go_on_with_the_answers_of_the_first(tmp_path):
    (tmp_path / "other").mkdir()

    async def first(engine):
        await opened(engine, accept(engine, SLOW))

    async def second(engine):
        ((_, result),) = await engine.journaled_calls.look_up("a", "")
        assert result.outputs[0].finish_reason is FinishReason.ERROR
        assert "another model" in result.outputs[0].error

    with_servers(tmp_path, first, second, model=tmp_path / "other")


def test_a_request_that_this_engine_would_not_have_accepted_is_ended_alone(tmp_path):
    async def first(engine):
        await opened(engine, accept(engine, SLOW, request_id="a"), accept(engine, SLOW, request_id="b"))
        await opened(engine, accept(engine, SLOW, request_id="c"))

    async def second(engine):
        await until(lambda: not engine.fleet.replicas[0].is_busy)
        for name, reason in (("a", FinishReason.ERROR), ("c", FinishReason.LENGTH)):
            result = (await engine.journaled_calls.look_up(name, ""))[0][1]
            assert result.outputs[0].finish_reason is reason
        ((_, result), _) = await engine.journaled_calls.look_up("a", "")
        assert "outside the vocabulary" in result.outputs[0].error

    def change(record):
        return replace(record, request=replace(record.request, prompt_token_ids=(SLOW, 5000)))

    with_servers(tmp_path, first)
    change_record(tmp_path / "journal", "a", change)
    with_servers(tmp_path, second)


@pytest.mark.parametrize("damage", ["not outputs of the request", "an end that the request has not had"])
def test_tokens_that_cannot_be_put_together_are_computed_again(tmp_path, damage):
    expected = [(SLOW + 1 + i) % 1000 for i in range(40)]

    async def first(engine):
        request_stream = await opened(engine, accept(engine, SLOW))
        await request_stream.__anext__()

    async def second(engine):
        await until(lambda: not engine.fleet.replicas[0].is_busy)
        ((_, result),) = await engine.journaled_calls.look_up("a", "")
        assert result.outputs[0].token_ids == expected

    with_servers(tmp_path, first)
    part = PromptPart(7, []) if damage == "not outputs of the request" else None
    ending = None if part else FinishReason.LENGTH
    outputs = [SequenceOutput("a", 0, [5], prompt=part, finish_reason=ending)]
    with contextlib.closing(sqlite3.connect(tmp_path / "journal")) as database, database:
        database.execute("INSERT OR REPLACE INTO outputs VALUES ('a', 1, ?)", (msgspec.msgpack.encode(outputs),))
    with_servers(tmp_path, second, second)


def test_a_record_that_cannot_be_written_fails_alone(tmp_path):
    async def first(engine):
        broken = engine.accept_request([SLOW], SamplingParams(max_tokens=4), request_id="a", prompt="\ud800")
        with pytest.raises(UnicodeEncodeError):
            engine.open([broken], stream=True)
        assert engine.admission.num_open == 0
        assert len(tokens_of(await drain(await opened(engine, accept(engine, SLOW, request_id="b"))))) == 40

    with_servers(tmp_path, first)


def test_a_call_is_looked_up_also_when_the_engine_is_lost(tmp_path):
    async def first(engine):
        await opened(engine, accept(engine, SLOW))
        engine.fail_all(EngineDeadError("killed"))
        ((_, result),) = await engine.journaled_calls.look_up("a", "")
        assert not result.finished

    with_servers(tmp_path, first)


def change_record(path, request_id, change):
    """Rewrite a request's record in a journal."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        ((blob,),) = database.execute("SELECT record FROM requests WHERE id = ?", (request_id,))
        record = change(msgspec.msgpack.decode(blob[5:], type=Record))
        database.execute("UPDATE requests SET record = ? WHERE id = ?", (msgspec.msgpack.encode(record), request_id))
