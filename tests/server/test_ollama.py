"""Ollama's dialect: its Python package over a real socket, and bodies over an engine that says the prompt again."""

import asyncio
import json

import ollama
import pytest

from penstock.api.request import FinishReason
from penstock.api.sampling_params import SamplingParams
from penstock.errors import InvalidRequestError
from penstock.frontend.output_processor import CompletionDelta
from penstock.parsers.conversation import format_of
from penstock.server.config import ServerConfig
from penstock.server.ollama.answers import ChatAnswer, Question
from penstock.server.ollama.body_to_params import conversation, sampling_params
from penstock.server.ollama.schema import ChatBody
from tests.server.echoing import HARMONY, HERMES, SHOW, echoing, write_checkpoint
from tests.support import fetch

HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"num_predict": 6, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MARKS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """A function that posts a body to a server of a template, and returns its answer: `show` has marks for infill, and
    does not reason."""
    folders = {
        "hermes": write_checkpoint(tmp_path_factory.mktemp("hermes"), HERMES),
        "show": write_checkpoint(tmp_path_factory.mktemp("show"), SHOW, MARKS),
    }
    with echoing(folders, ServerConfig(admin=True)) as run:

        def post(path, name="hermes", method="POST", headers=None, **body):
            async def talk(client, http):
                return await http.request(method, path, json=body or None, headers=headers)

            return run(name, talk)

        yield post


@pytest.fixture
def client(server):
    with ollama.Client(server.url) as opened:
        yield opened


def lines_of(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


# ── the package ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_package_gets_whole_and_streamed_answers_that_are_equal(server, client):
    whole = client.chat("tiny", HELLO, options=SHORT, logprobs=True, top_logprobs=2, keep_alive="5m")
    assert whole.done_reason == "length"
    assert whole.eval_count == len(whole.logprobs) == 6
    assert len(whole.logprobs[0].top_logprobs) == 2
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration > 0
    pieces = list(client.chat("tiny:latest", HELLO, options=SHORT, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces[:-1]] == [False] * (len(pieces) - 1)
    assert (pieces[-1].eval_count, pieces[-1].prompt_eval_count) == (6, whole.prompt_eval_count)

    async def generate():
        async with ollama.AsyncClient(server.url) as opened:
            parts = [part async for part in await opened.generate("tiny", "Hello", stream=True, options=SHORT)]
            return await opened.generate("tiny", "Hello", options=SHORT), parts

    generated, parts = asyncio.run(generate())
    assert "".join(part.response for part in parts) == generated.response == whole.message.content
    again = client.generate("tiny", "And?", context=generated.context, options=SHORT)
    assert again.context[: len(generated.context)] == generated.context
    form = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(client.chat("tiny", HELLO, format=form).message.content) == {"a": "x"}


def test_the_package_learns_what_is_served(client, tiny_llama):
    (listed,) = client.list().models
    assert (listed.model, listed.details.format) == ("tiny:latest", "safetensors")
    assert listed.size == (tiny_llama / "model.safetensors").stat().st_size
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == client.ps().models[0].context_length > 0
    assert shown.modelinfo["general.parameter_count"] > 1000
    assert [one.status for one in client.pull("tiny", stream=True)][-1] == client.pull("tiny:latest").status
    with pytest.raises(ollama.ResponseError, match="penstock serve --model") as refused:
        client.pull("llama3.2")
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="needs --admin"):
        client.copy("tiny", "other")


def test_the_root_tells_ollamas_clients_that_it_runs(server):
    assert fetch.get(server.url, headers={"user-agent": "ollama-python/0.6.3"}).text == "Ollama is running"
    assert fetch.get(server.url).json()["status"] == "ok"


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reasoning_and_calls_are_parts_of_the_message(ask):
    said = f"<think>\nHm.\n</think>\n\nFirst.{CALL}\n{CALL}Last."
    messages = [{"role": "user", "content": said}]
    whole = ask("/api/chat", messages=messages, tools=[TOOL], stream=False).json()
    first, second = whole["message"]["tool_calls"]
    assert first["function"] == {"index": 0, "name": "add", "arguments": {"a": 1}}
    assert (second["function"]["index"], whole["done_reason"]) == (1, "stop")
    assert whole["message"]["thinking"] == "Hm."
    lines = lines_of(ask("/api/chat", messages=messages, tools=[TOOL]))
    parts = [line["message"] for line in lines]
    assert "".join(part["content"] for part in parts) == whole["message"]["content"]
    assert "".join(part.get("thinking", "") for part in parts) == "Hm."
    calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert calls == [first["function"], second["function"]]
    assert all(lines[-1][name] >= 0 for name in DURATIONS)


def test_results_without_an_id_answer_the_calls_in_their_order(ask):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    other = {"function": {"name": "other", "arguments": {}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, other, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2", "tool_name": "add"},
        {"role": "tool", "content": "3"},
        {"role": "user", "content": "Go on."},
    ]
    answer = ask("/api/chat", "show", messages=messages, stream=False).json()
    _, assistant, *results, _ = json.loads(answer["message"]["content"])
    first, second, third = (made["id"] for made in assistant["tool_calls"])
    assert [result["tool_call_id"] for result in results] == [first, third, second]
    assert [result["name"] for result in results] == ["add", "add", "other"]


def test_a_final_message_of_the_assistant_is_continued(ask):
    messages = [*HELLO, {"role": "assistant", "content": "Begun"}]
    said = ask("/api/chat", "show", messages=messages, stream=False).json()["message"]["content"]
    assert (said[-6:], json.loads(said[:-5])) == ("]Begun", HELLO)


def test_a_raw_prompt_has_no_template_and_an_empty_one_loads(ask):
    raw = ask("/api/generate", "show", prompt="Once", raw=True, stream=False).json()
    assert (raw["response"], "context" in raw) == ("Once", False)
    with_system = ask("/api/generate", "show", prompt="Once", system="Be brief.", stream=False).json()
    assert [one["role"] for one in json.loads(with_system["response"])] == ["system", "user"]
    for name in ("system", "think"):
        refused = ask("/api/generate", prompt="Once", raw=True, **{name: "high"})
        assert f"{name} does not go with raw" in refused.json()["error"]
    loaded = ask("/api/generate", stream=True)
    assert loaded.json()["done_reason"] == "load"
    unloaded = ask("/api/chat", messages=[], keep_alive="0s")
    assert (unloaded.json()["done_reason"], unloaded.headers["penstock-ignored"]) == ("unload", "keep_alive")


@pytest.mark.parametrize(
    ("template", "think", "variables", "ignored"),
    [
        (HERMES, False, {"enable_thinking": False}, ()),
        (HERMES, "high", {"enable_thinking": True}, ()),
        (HARMONY + "{% if reasoning_effort %}{% endif %}", "max", {"reasoning_effort": "high"}, ()),
        (HARMONY, True, {}, ()),
        (HARMONY, False, {}, ("think",)),
        (SHOW, False, {}, ()),
    ],
)
def test_think_sets_the_variables_of_the_template(template, think, variables, ignored):
    asked = conversation(ChatBody.model_validate({"messages": HELLO, "think": think}), format_of(template))
    assert (asked.variables, asked.ignored) == (variables, ignored)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"think": True}, "think: this model does not reason"),
        ({"options": {"num_ctx": 10**6}}, "options.num_ctx is 1000000, and this server's context has 16384"),
        ({"options": {"num_ctx": 3}}, "messages is too long: 38 tokens, and options.num_ctx is 3"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n: a penalty"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported here"),
        ({"options": {"temperature": -1}}, "options.temperature must be"),
        ({"options": {"temprature": 1}}, "did you mean 'temperature'"),
        (
            {"messages": [{"role": "user", "content": "", "images": ["iVBO"]}]},
            "messages[0].images: an image is not supported here: this checkpoint takes text",
        ),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "the prompt is too long"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"template": "{{ .Prompt }}"}, "template is not supported here"),
        ({"shift": True}, "shift is not supported here"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(ask, body, said):
    answer = ask("/api/chat", "show", **{"messages": HELLO, **body})
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_a_suffix_needs_a_tokenizer_with_marks(ask):
    refused = ask("/api/generate", prompt="def f(", suffix="return 1")
    assert "suffix: this model's tokenizer has no marks" in refused.json()["error"]
    answer = ask("/api/generate", "show", prompt="a", suffix="b", stream=False).json()
    assert (answer["prompt_eval_count"], answer["response"]) == (5, "ab")
    shown = ask("/api/show", "show", stream=True).json()
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"]


def test_operators_give_the_model_names_and_take_them_away(ask):
    assert ask("/api/copy", source="penstock", destination="other:1b").status_code == 404
    name = ask("/api/tags", method="GET").json()["models"][0]["name"]
    assert ask("/api/copy", source=name, destination="other:1b").status_code == 200
    assert ask("/api/create", **{"model": "third", "from": "other:1b", "stream": False}).json()["status"] == "success"
    assert ask("/api/chat", model="third", messages=HELLO, stream=False).json()["model"] == "third"
    for added in ("other:1b", "third:latest"):
        assert ask("/api/delete", method="DELETE", model=added).status_code == 200
    assert len(ask("/api/ps", method="GET").json()["models"]) == 1
    assert "stop the server instead" in ask("/api/delete", method="DELETE", model=name).json()["error"]
    assert ask("/api/nothing").json()["error"].startswith("unknown route")


def test_a_stream_that_waits_or_is_aborted_says_so_in_a_line():
    answer = ChatAnswer(Question("chat-1", "tiny", 0.0, None, None))
    waiting = json.loads(answer.keep_alive())
    assert (waiting["done"], waiting["message"]) == (False, {"role": "assistant", "content": ""})
    aborted = CompletionDelta(0, "", [], finish_reason=FinishReason.ABORT, error="the server stops")
    assert answer.stream_delta(0, aborted) + answer.end_stream([]) == b'{"error":"the server stops"}\n'


def test_open_options_are_the_checkpoints_or_ollamas():
    def params(defaults=None, **options):
        return sampling_params(ChatBody.model_validate({"options": options}), defaults or SamplingParams(), 100)

    assert (params().temperature, params().top_k, params().top_p, params().max_tokens) == (0.8, 40, 0.9, None)
    assert (params(SamplingParams(temperature=0.6)).temperature, params(SamplingParams(min_p=0.1)).top_k) == (0.6, None)
    assert params(num_predict=-2, top_k=-1, seed=-1).top_k == 0
    assert params(num_predict=7, stop="x").stop == ("x",)
    off = params(SamplingParams(repetition_penalty=1.2), repeat_last_n=0, presence_penalty=1)
    assert (off.repetition_penalty, off.presence_penalty) == (1.0, 0.0)
    assert params(repeat_last_n=100, repeat_penalty=1.1).repetition_penalty == 1.1
    with pytest.raises(InvalidRequestError, match="repeat_last_n"):
        params(SamplingParams(repetition_penalty=1.2), repeat_last_n=64)
