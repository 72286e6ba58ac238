"""What all dialects share, seen through each: failures are told in its shape, of whole answers and of streams."""

import asyncio
import json
import threading
import time

import pytest

from penstock.api.request import FinishReason
from penstock.errors import ShuttingDownError
from penstock.server.body_route import LARGE_BODY
from penstock.server.config import CallLimitsConfig, ServerConfig
from penstock.server.openai.completion_answer import CompletionAnswer
from tests.engine.rule_core import RuleCore
from tests.server.in_process import shared_app, with_app

MESSAGES = [{"role": "user", "content": "the quick"}]
CALLS = {
    "/v1/chat/completions": {"model": "rule", "messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"model": "rule", "prompt": "the quick", "max_tokens": 8},
    "/v1/responses": {"model": "rule", "input": "the quick", "max_output_tokens": 8},
    "/v1/messages": {"model": "rule", "messages": MESSAGES, "max_tokens": 8},
    "/": {"inputs": "the quick", "parameters": {"max_new_tokens": 8}},
}
SHAPES = {
    "/v1/messages": lambda kind, message: {"type": "error", "error": {"type": kind, "message": message}},
    "/": lambda kind, message: {"error": message, "error_type": kind},
}


def openai_shape(kind, message, code=None):
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class BrokenCore(RuleCore):
    """Each sequence fails after its second token."""

    def step(self, *args):
        for key, (_, done) in list(self._running.items()):
            if done == 2:
                self.finish_request(*key, FinishReason.ERROR)
        return super().step(*args)


BROKEN_CORE = f"{__name__}:BrokenCore"


@pytest.fixture(scope="module")
def broken(tiny_llama):
    with shared_app(tiny_llama, BROKEN_CORE) as talk_to:
        yield talk_to


@pytest.fixture(scope="module")
def narrow(tiny_llama):
    """An application that takes one request at a time."""
    with shared_app(
        tiny_llama, config=ServerConfig(call_limits=CallLimitsConfig(max_concurrent_requests=1))
    ) as talk_to:
        yield talk_to


@pytest.fixture(scope="module")
def healthy(tiny_llama):
    with shared_app(tiny_llama) as talk_to:
        yield talk_to


def events_of(answer):
    parts = [dict(line.split(": ", 1) for line in part.split("\n")) for part in answer.text[:-2].split("\n\n")]
    return [(part.get("event"), json.loads(part["data"])) for part in parts]


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/chat/completions", 500, "server_error"),
        ("/v1/completions", 500, "server_error"),
        ("/v1/responses", 500, "server_error"),
        ("/v1/messages", 500, "api_error"),
        ("/", 424, "generation"),
    ],
)
def test_an_answer_that_fails_is_an_error_in_the_dialects_shape(broken, path, status, kind):
    async def talk(http, engine, app):
        whole = await http.post(path, json=CALLS[path])
        expected = SHAPES.get(path, openai_shape)(kind, "the logits are not finite")
        assert (whole.status_code, whole.json()) == (status, expected)
        streamed = await http.post(path, json=CALLS[path] | {"stream": True})
        assert streamed.status_code == 200
        *events, (name, last) = events_of(streamed)
        assert events, "it had begun"
        if path == "/v1/responses":
            assert (name, last["type"], last["code"]) == ("error", "error", "server_error")
            assert (last["message"], last["sequence_number"]) == ("the logits are not finite", len(events))
        else:
            assert (name, last) == ("error" if path == "/v1/messages" else None, expected)

    broken(talk)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/chat/completions", 429, "rate_limit_error"),
        ("/v1/messages", 529, "overloaded_error"),
        ("/", 429, "overloaded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_overload_is_told_before_any_stream_begins(narrow, path, status, kind, stream):
    async def talk(http, engine, app):
        body = CALLS[path] | {"stream": stream}
        answers = await asyncio.gather(*(http.post(path, json=body) for _ in range(2)))
        (refused,) = (answer for answer in answers if answer.status_code != 200)
        assert refused.status_code == status
        assert kind in refused.text
        assert int(refused.headers["retry-after"]) >= 1

    narrow(talk)


REFUSAL = ShuttingDownError("the server is shutting down", 5.0)


class EndlessCore(RuleCore):
    """Takes its time for each token, so that a call may be cut at any of them."""

    def step(self, *args):
        time.sleep(0.005)
        return super().step(*args)


ENDLESS_CORE = f"{__name__}:EndlessCore"


def endless(path, **more):
    parameters = {"parameters": {"max_new_tokens": 400, "details": True}}
    names = {"/": parameters, "/v1/responses": {"max_output_tokens": 400}}
    return CALLS[path] | names.get(path, {"max_tokens": 400}) | more


async def drain(engine, when):
    """The end of a drain, as soon as so many tokens were generated."""
    while engine.metrics.generation_tokens.values.get("", 0) < when:
        await asyncio.sleep(0.001)
    engine.refuse(REFUSAL)
    engine.abort_all(str(REFUSAL))


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/chat/completions", 503, "shutting_down"),
        ("/v1/completions", 503, "shutting_down"),
        ("/v1/responses", 503, "shutting_down"),
        ("/v1/messages", 529, "overloaded_error"),
        ("/", 503, "overloaded"),
    ],
)
def test_a_call_that_a_drain_cuts_before_it_was_told_anything_may_be_made_elsewhere(tiny_llama, path, status, kind):
    async def talk(http, engine, app):
        answer, _ = await asyncio.gather(http.post(path, json=endless(path)), drain(engine, 5))
        assert answer.status_code == status
        assert kind in answer.text
        assert answer.headers["retry-after"] == "5"
        assert engine.metrics.failures.values == {"shutting_down": 1}

    with_app(talk, tiny_llama, ENDLESS_CORE)


ABORTED = {
    "/v1/chat/completions": lambda events: events[-1]["choices"][0]["finish_reason"] == "abort",
    "/v1/completions": lambda events: events[-1]["choices"][0]["finish_reason"] == "abort",
    "/v1/responses": lambda events: (
        events[-1]["type"] == "response.incomplete"
        and events[-1]["response"]["incomplete_details"]["reason"] == "abort"
    ),
    "/v1/messages": lambda events: events[-2]["delta"]["stop_reason"] == "pause_turn",
    "/": lambda events: events[-1] == {"error": str(REFUSAL), "error_type": "incomplete_generation"},
}


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_that_a_drain_cuts_ends_in_the_words_of_its_dialect(tiny_llama, path):
    async def talk(http, engine, app):
        answer, _ = await asyncio.gather(http.post(path, json=endless(path, stream=True)), drain(engine, 40))
        events = [
            json.loads(line[6:])
            for line in answer.text.splitlines()
            if line.startswith("data: ") and "[DONE]" not in line
        ]
        assert len(events) > 3
        assert ABORTED[path](events), events[-3:]
        assert engine.metrics.failures.values == {"shutting_down": 1}

    with_app(talk, tiny_llama, ENDLESS_CORE)


HALVES = {
    "/v1/chat/completions": [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "\ud800"}}),
        ("user",),
    ],
    "/v1/completions": [("structured_outputs", {"choice": ["a", "\udfff"]}), ("stop",), ("prompt",)],
    "/v1/responses": [("metadata", {"\ud800": "a"}), ("user",)],
    "/v1/messages": [("metadata", {"user_id": "\ud83d"}), ("stop_sequences",)],
    "/": [("parameters", {"grammar": {"type": "regex", "value": "\ud800"}}), ("inputs",)],
}
PLACES = {
    "response_format": "response_format.json_schema.name",
    "structured_outputs": "structured_outputs.choice[1]",
    "metadata": "metadata.",
    "parameters": "parameters.grammar.value",
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("padding", [0, LARGE_BODY], ids=["small", "large"])
def test_half_a_surrogate_pair_outside_of_a_conversation_is_refused_by_the_name_of_its_field(healthy, path, padding):
    async def talk(http, engine, app):
        for name, *value in HALVES[path]:
            body = CALLS[path] | {name: value[0] if value else "a\ud800"}
            content = json.dumps(body).encode() + b" " * padding
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == (422 if path == "/" else 400), answer.text
            assert f"{PLACES.get(name, name)}" in answer.text
            assert "surrogate" in answer.text

    healthy(talk)


RESULT = {"role": "tool", "tool_call_id": "c\udfff", "content": "cut\ud83d"}
CALL = {"id": "c\udfff", "type": "function", "function": {"name": "f", "arguments": '{"a": "\ud83d"}'}}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "cut\ud83d"}
BLOCK = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "cut\ud83d"}]}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"\ud83d": "\ud83d"}}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}, RESULT]}),
        ("/v1/responses", {"input": [*MESSAGES, OUTPUT], "instructions": "\ud83d"}),
        ("/v1/responses", {"input": "\ud83d"}),
        (
            "/v1/messages",
            {
                "messages": [*MESSAGES, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [BLOCK]}],
                "system": "\ud83d",
            },
        ),
    ],
)
@pytest.mark.parametrize("padding", [0, LARGE_BODY], ids=["small", "large"])
def test_half_a_surrogate_pair_in_a_conversation_is_replaced(healthy, path, change, padding):
    async def talk(http, engine, app):
        answers = []
        for half in ("\\ud83d", "\\ufffd"):
            content = json.dumps(CALLS[path] | change).replace("\\ud83d", half).encode() + b" " * padding
            answers.append(await http.post(path, content=content, headers={"content-type": "application/json"}))
            assert answers[-1].status_code == 200, answers[-1].text
        mended, replaced = (answer.json()["usage"] for answer in answers)
        assert mended == replaced, "the same prompt"

    healthy(talk)


@pytest.mark.parametrize("padding", [0, LARGE_BODY], ids=["small", "large"])
def test_whole_surrogate_pairs_are_text(healthy, padding):
    async def talk(http, engine, app):
        for prompt in ("\U0001f600", "\\ud800", "\ud7ff"):
            content = json.dumps(CALLS["/v1/completions"] | {"prompt": prompt}).encode() + b" " * padding
            answer = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text

    healthy(talk)


def test_a_failure_ends_a_stream_of_json_lines_with_a_line_that_says_so(broken):
    async def talk(http, engine, app):
        body = {"messages": MESSAGES}
        streamed = await http.post("/api/chat", json=body)
        assert streamed.headers["content-type"] == "application/x-ndjson"
        *_, last = map(json.loads, streamed.text.splitlines())
        assert last.keys() == {"error"}
        whole = await http.post("/api/chat", json=body | {"stream": False})
        assert (whole.status_code, whole.json()) == (500, last)
        resumed = await http.post("/api/chat", json=body, headers={"last-event-id": "chat-1/1"})
        assert "Last-Event-ID" in resumed.json()["error"]

    broken(talk)


class SlowCore(RuleCore):
    """Takes half a second for its first step."""

    def step(self, *args):
        if not self._steps:
            time.sleep(0.5)
        return super().step(*args)


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        ("/v1/chat/completions", ": keep-alive"),
        ("/v1/completions", ": keep-alive"),
        ("/v1/responses", "event: response.in_progress"),
        ("/v1/messages", "event: ping"),
        ("/", ": keep-alive"),
    ],
)
def test_a_silent_stream_gets_a_sign_of_life(tiny_llama, monkeypatch, path, sign):
    monkeypatch.setattr("penstock.server.streams.SILENCE_SECONDS", 0.1)

    async def talk(http, engine, app):
        slow, quick = [(await http.post(path, json=CALLS[path] | {"stream": True})).text for _ in range(2)]
        first_token = slow.index("data: " if path != "/v1/responses" else "response.output_text.delta")
        assert slow.count(sign) >= quick.count(sign) + 2
        if sign.startswith(":"):
            assert slow.count(sign) == slow[:first_token].count(sign), "a stream that speaks needs none"

    with_app(talk, tiny_llama, f"{__name__}:SlowCore")


def test_an_answer_of_many_log_probabilities_is_formatted_beside_the_event_loop(tiny_llama, monkeypatch):
    threads = []
    whole = CompletionAnswer.complete_body

    def complete_body(self, outputs):
        threads.append(threading.current_thread() is threading.main_thread())
        return whole(self, outputs)

    monkeypatch.setattr(CompletionAnswer, "complete_body", complete_body)

    async def talk(http, engine, app):
        small = {"model": "rule", "prompt": "the quick", "max_tokens": 8}
        assert (await http.post("/v1/completions", json=small)).status_code == 200
        assert (await http.post("/v1/completions", json=small | {"n": 64, "max_tokens": 300})).status_code == 200

    with_app(talk, tiny_llama)
    assert threads == [True, False]
