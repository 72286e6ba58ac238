"""Transcriptions and translations over HTTP, by OpenAI's client."""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import openai
import pytest

from penstock import LLM, SamplingParams
from penstock.api.request import Adapter
from penstock.errors import ClientGoneError, InvalidRequestError, OverloadedError, RateLimitError, ShuttingDownError
from penstock.fleet.link import ENGINE_CORE
from penstock.frontend.audio.transcription import Question
from penstock.frontend.open_requests import Series
from penstock.server.call_context import CallContext
from penstock.server.dialect import Call
from penstock.server.openai import windows
from penstock.server.openai.multipart import parse_form
from tests.server.in_process import with_app
from tests.server.running import RunningServer
from tests.support.hearing import END, a_sound, make_hearing, wav_of

LONG = wav_of(a_sound(5.3))
SHORT = wav_of(a_sound(1.5, 4))
TOKENS = "penstock_prompt_tokens_total"
LONGEST_NAME = "ä" * 125 + ".wav"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hearing(tmp_path_factory.mktemp("hearing")).folder


@pytest.fixture(scope="module")
def expected(folder):
    """Transcripts by `LLM.transcribe`."""
    with LLM(str(folder), dtype="float32", kv_cache_memory="8MiB") as llm:
        return {
            "long": llm.transcribe(LONG, language="en"),
            "short": llm.transcribe(SHORT, language="de"),
            "translated": llm.transcribe(SHORT, translate=True),
        }


@pytest.fixture(scope="module")
def hearing_server(folder, tmp_path_factory):
    journal = tmp_path_factory.mktemp("journal") / "journal"
    flags = ("--model", str(folder), "--dtype", "float32", "--kv-cache-memory", "8MiB", "--journal", str(journal))
    running = RunningServer(*flags, "--max-audio-seconds", "20").wait_until_listening()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(hearing_server):
    return openai.OpenAI(base_url=f"{hearing_server.url}/v1", api_key="none", max_retries=0)


def test_each_format_has_the_transcript(client, expected):
    asked = {"file": ("a.wav", LONG), "model": client.models.list().data[0].id, "language": "en"}
    ask = client.audio.transcriptions.create
    found = ask(**asked)
    assert found.text == expected["long"].text
    assert found.usage.seconds == 6
    assert ask(**asked, response_format="text") == expected["long"].text + "\n"
    verbose = ask(**asked, response_format="verbose_json", timestamp_granularities=["segment"])
    assert (verbose.text, verbose.language) == (found.text, "en")
    assert verbose.duration == pytest.approx(5.3)
    segments = expected["long"].segments
    assert [(one.text, one.tokens, one.seek) for one in verbose.segments] == [
        (one.text, list(one.tokens), one.seek) for one in segments
    ]
    for one in verbose.segments:
        assert one.avg_logprob < 0
        assert 0 <= one.no_speech_prob <= 1
        assert one.compression_ratio > 0
    srt, vtt = (ask(**asked, response_format=form) for form in ("srt", "vtt"))
    assert srt.startswith("1\n00:00:00,100 --> 00:00:01,800\n")
    assert vtt.startswith("WEBVTT\n\n00:00:00.100 --> 00:00:01.800\n")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(segments)


@pytest.mark.filterwarnings("ignore:deprecated")  # the client's method
def test_a_sound_is_translated(client, expected):
    found = client.audio.translations.create(file=("a.wav", SHORT), model="tgi")
    assert found.text == expected["translated"].text
    found = client.audio.translations.create(file=("a.wav", SHORT), model="tgi", response_format="verbose_json")
    assert found.language == "en"
    found = client.audio.transcriptions.create(file=("a.wav", SHORT), model="tgi", language="de", temperature=0)
    assert found.text == expected["short"].text


def test_a_stream_has_the_text_of_each_window_and_then_all_of_it(client, expected):
    events = list(client.audio.transcriptions.create(file=("a.wav", LONG), model="tgi", language="en", stream=True))
    assert [event.type for event in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
    assert len(events) > 3
    assert events[-1].text == expected["long"].text
    assert "".join(event.delta for event in events[:-1]).strip() == expected["long"].text


def test_the_tokens_of_the_text_have_log_probabilities_if_asked_for(client, expected):
    ask = functools.partial(client.audio.transcriptions.create, model="tgi", language="en", include=["logprobs"])
    found = ask(file=("a.wav", LONG))
    tokens = [token for segment in expected["long"].segments for token in segment.tokens if token < END]
    assert len(found.logprobs) == len(tokens) > 0
    assert all(one.logprob <= 0 and one.token and one.bytes for one in found.logprobs)
    *deltas, done = ask(file=("a.wav", LONG), stream=True)
    streamed = [one.logprob for delta in deltas for one in delta.logprobs]
    assert streamed == [one.logprob for one in done.logprobs] == [one.logprob for one in found.logprobs]


def test_an_engine_killed_in_the_middle_of_a_transcript_changes_nothing(hearing_server, client, expected):
    texts, seen = [], threading.Event()

    def ask(seed):  # of their own: what the journal has is not computed again
        asked = {"model": "tgi", "language": "en", "extra_body": {"seed": seed}}
        events = client.audio.transcriptions.create(file=("a.wav", LONG), stream=True, **asked)
        for event in events:
            seen.set()
            text = getattr(event, "text", "")
        texts.append(text)

    asking = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for one in asking:
        one.start()
    seen.wait()
    os.kill(hearing_server.engine_pid, signal.SIGKILL)
    for one in asking:
        one.join()
    assert texts == [expected["long"].text] * 3


def test_what_cannot_be_done_is_refused_by_name(client):
    ask = client.audio.transcriptions.create
    for options, word in (
        ({"language": "xx"}, "language"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities"),
        ({"include": ["logprobs"], "response_format": "text"}, "include"),
        ({"include": ["words"]}, "include"),
        ({"chunking_strategy": {"type": "server_vad", "threshold": 0.7}}, "chunking_strategy"),
        ({"temperature": 7}, "temperature"),
        ({"stream": True, "response_format": "srt"}, "stream"),
        ({"prompt": "word " * 200}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=word):
            ask(file=("a.wav", SHORT), model="tgi", **options)
    for content, word in ((b"nothing", "soundfile|format"), (wav_of(a_sound(21)), "max_audio_seconds"), (b"", "file")):
        with pytest.raises(openai.BadRequestError, match=word):
            ask(file=("a.wav", content), model="tgi")
    with pytest.raises(openai.NotFoundError):
        ask(file=("a.wav", SHORT), model="another")
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
        client.chat.completions.create(model="tgi", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
        client.completions.create(model="tgi", prompt="Hello")


def test_a_model_that_takes_text_says_so(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="does not transcribe"):
        client.audio.transcriptions.create(file=("a.wav", SHORT), model="tgi")
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="input_audio"):
        client.chat.completions.create(model="tgi", messages=[{"role": "user", "content": [part]}])


def form(*parts, boundary="x"):
    made = b""
    for head, content in parts:
        made += f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
    return made + f"--{boundary}--\r\n".encode()


def test_forms_are_divided_into_fields_and_files():
    body = form(
        ('name="file"; filename="a.wav"', b"\r\n--y\0\xff"), ('name="model"', "ä".encode()), ('name="l[]"', b"1")
    )
    body = body.replace(b"--x--", b'--x \r\ncontent-disposition: form-data; name="l[]"\r\n\r\n2\r\n--x--')
    for text in (b"", b"a preamble\r\n"):
        found = parse_form('multipart/form-data; boundary="x"', text + body)
        assert found.files == {"file": b"\r\n--y\0\xff"}
        assert found.fields == {"model": ["ä"], "l[]": ["1", "2"]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"--x--"),
        ("multipart/form-data; boundary=" + "x" * 71, b"--x--"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", form(('name="a"', b"1"))[:-8]),
        ("multipart/form-data; boundary=x", form(("nothing", b"1"))),
        ("multipart/form-data; boundary=x", form(('name="a"', b"\xff"))),
        ("multipart/form-data; boundary=x", form(('name="a"', b"1" * 5000))),
        ("multipart/form-data; boundary=x", form(*[('name="a"', b"1")] * 65)),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"a" * 9000 + b"\r\n\r\n\r\n--x--"),
        ("multipart/form-data; boundary=x", form(('name="f"; filename="' + "a" * 1024 + '"', b"1"))),
        ("multipart/form-data; boundary=x", form(*[('name="f"; filename="g"', b"1")] * 2)),
    ],
)
def test_damaged_forms_are_refused(kind, body):
    with pytest.raises(InvalidRequestError):
        parse_form(kind, body)


def test_a_file_with_the_longest_name_of_a_file_system_is_taken(client, expected):
    found = client.audio.transcriptions.create(file=(LONGEST_NAME, SHORT), model="tgi", language="de")
    assert found.text == expected["short"].text
    escaped = form((f"name=file; filename*=utf-8''{'%C3%A4' * 125}.wav; name=other", b"1"))
    assert parse_form("multipart/form-data; boundary=x", escaped).files == {"file": b"1"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_sends_a_file_with_the_longest_name(hearing_server, expected, tmp_path):
    name = LONGEST_NAME
    (tmp_path / name).write_bytes(SHORT)
    command = ["curl", "-s", f"{hearing_server.url}/v1/audio/transcriptions", "-F", f"file=@{tmp_path / name}"]
    done = subprocess.run([*command, "-F", "language=de"], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["text"] == expected["short"].text


def test_the_task_is_checked_before_the_sound_is_read(client):
    with pytest.raises(openai.BadRequestError, match="language"):
        client.audio.transcriptions.create(file=("a.wav", b"nothing"), model="tgi", language="xx")


async def bodies_of_a_stream(app, leave, on_body):
    """What an ASGI server is given to send, for a streamed transcript whose client disconnects when `leave` is set."""
    content, sent = (
        form(('name="file"; filename="a.wav"', LONG), ('name="language"', b"en"), ('name="stream"', b"1")),
        [],
    )
    pending = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if pending:
            return pending.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if body := message.get("body"):
            sent.append(body)
            await on_body()

    headers = [(b"content-type", b"multipart/form-data; boundary=x"), (b"content-length", b"%d" % len(content))]
    path, scope = (
        "/v1/audio/transcriptions",
        {"type": "http", "method": "POST", "headers": headers, "query_string": b""},
    )
    await app({**scope, "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http"}, receive, send)
    return b"".join(sent)


def test_a_client_that_leaves_between_two_windows_ends_the_transcript(folder):
    async def talk(http, engine, app):
        leave = asyncio.Event()

        async def on_body():  # between two windows: no request runs
            leave.set()
            await asyncio.sleep(0.05)

        sent = await bodies_of_a_stream(app, leave, on_body)
        assert sent.count(b"transcript.text.delta") == 1
        assert b"transcript.text.done" not in sent

    with_app(talk, folder, ENGINE_CORE)


def test_a_client_that_leaves_during_the_first_window_cancels_it(folder, monkeypatch):
    async def talk(http, engine, app):
        leave, opened, open_stream = asyncio.Event(), [], engine.open

        def open_and_leave(*args, **options):
            leave.set()
            opened.append(open_stream(*args, **options))
            return opened[-1]

        async def on_body():
            pass

        monkeypatch.setattr(engine, "open", open_and_leave)
        sent = await bodies_of_a_stream(app, leave, on_body)
        assert len(opened) == 1
        assert b"transcript.text" not in sent

    with_app(talk, folder, ENGINE_CORE)


def test_only_the_first_window_is_refused_and_others_wait_and_outlast_a_shutdown(folder, expected, monkeypatch):
    async def talk(http, engine, app):
        open_stream, refusals, opened = engine.open, {}, 0

        def open_or_refuse(*args, **options):
            nonlocal opened
            opened += 1
            if error := refusals.get(opened):
                raise error
            return open_stream(*args, **options)

        async def ask(*errors, **headers):
            nonlocal opened
            opened, data = 0, {"language": "en"}
            refusals.clear()
            refusals.update(errors)
            files = {"file": ("a.wav", LONG)}
            return await http.post("/v1/audio/transcriptions", files=files, data=data, headers=headers, timeout=60)

        monkeypatch.setattr(engine, "open", open_or_refuse)
        full, spent = OverloadedError("full", 0.01), RateLimitError("spent", 0.01)
        answer = await ask((2, full), (3, spent), (5, full))
        assert answer.json()["text"] == expected["long"].text
        assert (await ask((1, full))).status_code == 429
        assert (await ask(*((i, full) for i in range(2, 99)), **{"x-queue-timeout": "0.05"})).status_code == 429
        opened, asking = 0, asyncio.ensure_future(ask())
        while opened < 2:
            await asyncio.sleep(0.001)
        engine.refuse(ShuttingDownError("closing time"))
        await engine.drained()
        assert (await asking).json()["text"] == expected["long"].text
        assert (await ask()).status_code == 503

    with_app(talk, folder, ENGINE_CORE)


def test_a_window_that_was_refused_is_shared_with_an_equal_call_that_begins_it_meanwhile(
    folder, expected, monkeypatch, tmp_path
):
    async def talk(http, engine, app):
        open_stream, opened, other = engine.open, [], []

        async def ask(name):
            files, headers = {"file": ("a.wav", LONG)}, {"x-request-id": name}
            answer = await http.post(
                "/v1/audio/transcriptions", files=files, data={"language": "en"}, headers=headers, timeout=60
            )
            return answer.json()["text"]

        def open_or_refuse(accepted, *, alias, **options):
            request_id = accepted[0].request.request_id
            if alias == "first" and opened and request_id not in opened:
                if not other:
                    other.append(asyncio.ensure_future(ask("second")))
                raise OverloadedError("full", 0.001)
            opened.append(request_id)
            return open_stream(accepted, alias=alias, **options)

        monkeypatch.setattr(engine, "open", open_or_refuse)
        assert await ask("first") == await other[0] == expected["long"].text
        assert len(opened) == len(set(opened)) > 1

    with_app(talk, folder, ENGINE_CORE, journal=tmp_path / "journal")


ASKED = [Question((1,), SamplingParams(), ())]
INFO = SimpleNamespace(model_identity="model", arithmetic="arithmetic")


def test_windows_that_an_adapter_transcribed_are_not_those_of_the_model():
    def named(adapter):
        engine = SimpleNamespace(journaled=True, info=INFO)
        return windows._name(SimpleNamespace(engine=engine, tenant="", adapter=adapter), ASKED)

    tuned = Adapter("tuned", "folder", "digest", 8)
    assert len({named(None), named(tuned), named(replace(tuned, digest="another"))}) == 3


def test_a_client_that_leaves_while_its_window_comes_from_the_journal_has_no_other_computed():
    opened = []

    class Recorded(contextlib.nullcontext):
        def __init__(self):
            super().__init__()
            self.is_left = asyncio.Event()

        def abort(self):
            self.is_left.set()

        async def results(self):
            await self.is_left.wait()
            raise ClientGoneError("the reader has left")

    async def look_up(*_):
        return True

    async def reopen(*_):
        return Recorded()

    async def receive():
        return {"type": "http.disconnect"}

    def open_stream(accepted, **_):
        opened.append(accepted)
        raise ClientGoneError("the client has gone")

    def accept(*_, request_id, **__):
        return SimpleNamespace(request=SimpleNamespace(request_id=request_id))

    engine = SimpleNamespace(
        journaled=True,
        journaled_calls=SimpleNamespace(look_up=look_up, reopen=reopen),
        info=INFO,
        admission=SimpleNamespace(queue_seconds=lambda _: 1.0),
        open=open_stream,
        accept_request=accept,
    )
    call = Call(
        CallContext(receive=receive), SimpleNamespace(engine=engine, names=SimpleNamespace(all=("model",)), created=0)
    )
    with pytest.raises(ClientGoneError):
        asyncio.run(windows._ask(call, ASKED, Series(), watched=True))
    assert not opened


def test_a_call_that_is_sent_again_after_the_server_was_killed_computes_only_what_is_missing(folder, tmp_path):
    flags = ("--model", str(folder), "--dtype", "float32", "--kv-cache-memory", "8MiB")
    server = RunningServer(*flags, "--journal", str(tmp_path / "journal")).wait_until_listening()
    files = {"file": ("a.wav", LONG)}
    try:
        url, data = f"{server.url}/v1/audio/transcriptions", {"language": "en", "stream": "true"}
        with httpx.stream("POST", url, files=files, data=data, timeout=60) as answer:
            deltas = (line for line in answer.iter_lines() if "transcript.text.delta" in line)
            next(deltas)
            next(deltas)
            os.kill(server.process.pid, signal.SIGKILL)
        server.stop()
        server = RunningServer(*flags, "--journal", str(tmp_path / "journal")).wait_until_listening()

        def ask(**fields):
            """The text, and the prompt tokens of windows that were computed."""
            before, url = server.metrics()[TOKENS], f"{server.url}/v1/audio/transcriptions"
            answer = httpx.post(url, files=files, data=fields, timeout=60)
            return answer.json()["text"], server.metrics()[TOKENS] - before

        text, missing = ask(language="en")
        assert ask(language="en") == (text, 0)
        anew, whole = ask(language="en", seed="1")
        assert anew == text
        assert missing < whole
        text, _ = ask(response_format="verbose_json")  # two questions about a window, and one about the language
        assert ask(response_format="verbose_json") == (text, 0)
    finally:
        server.stop()


def test_unknown_fields_are_named_in_the_header(hearing_server):
    files = {"file": ("a.wav", SHORT)}
    answer = httpx.post(
        f"{hearing_server.url}/v1/audio/transcriptions", files=files, data={"language": "de", "frob": "1"}, timeout=60
    )
    assert answer.status_code == 200
    assert json.loads(answer.content)["text"]
    assert answer.headers["penstock-ignored"] == "frob"
