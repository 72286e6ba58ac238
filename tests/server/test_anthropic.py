"""Anthropic's dialect, through Anthropic's own client, against a real server."""

import json
import typing

import anthropic
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase

from penstock.server.anthropic.schema import CountTokensBody, MessagesBody
from tests.support import fetch
from tests.support.bodies import known_fields

HELLO = [{"role": "user", "content": "the quick brown fox"}]
GREEDY = {"extra_body": {"temperature": 0}}  # the client has no argument for it any more


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


def create(claude, **options):
    return claude.messages.create(**{"model": "tiny", "max_tokens": 12, "messages": HELLO} | GREEDY | options)


def refusal(server, **change):
    body = {"model": "tiny", "max_tokens": 5, "messages": HELLO} | change
    content = json.dumps({name: value for name, value in body.items() if value is not None})
    answer = fetch.post(f"{server.url}/v1/messages", content=content, headers={"content-type": "application/json"})
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert set(body["error"]) == {"type", "message"}
    assert body["type"] == "error"
    return answer.status_code, body["error"]["type"], body["error"]["message"]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_conversation_is_answered_with_its_usage(claude):
    message = create(claude)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 12


def test_a_streamed_message_is_the_same_message_in_pieces(claude):
    whole = create(claude)
    with claude.messages.stream(model="tiny", max_tokens=12, messages=HELLO, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.content[0].text
    assert message.model_dump(exclude={"id", "usage"}) == whole.model_dump(exclude={"id", "usage"})
    assert message.usage.output_tokens == 12


def test_a_stream_is_the_sequence_of_events_that_anthropic_documents(server):
    body = {"messages": HELLO, "max_tokens": 3, "temperature": 0, "stream": True}
    answer = server.post("/v1/messages", **body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    names, data = [], []
    for part in answer.text[:-2].split("\n\n"):
        name, line = part.split("\n")
        names.append(name.removeprefix("event: "))
        data.append(json.loads(line.removeprefix("data: ")))
    assert names == [item["type"] for item in data]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_a_stop_sequence_ends_the_answer_and_is_named(claude):
    text = create(claude).content[0].text
    stop = text[len(text) // 2 :][:2]
    message = create(claude, stop_sequences=["never", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_a_prompt_found_in_the_cache_is_told_apart_in_the_usage(claude):
    options = {"messages": [{"role": "user", "content": "a request that goes in comes out " * 6}], "max_tokens": 2}
    first, second = create(claude, **options).usage, create(claude, **options).usage
    assert second.cache_read_input_tokens >= 32
    total = first.input_tokens + first.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == total
    with claude.messages.stream(model="tiny", **GREEDY, **options) as stream:
        usage = stream.get_final_message().usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (
        second.input_tokens,
        second.cache_read_input_tokens,
    )


# ── what goes into the prompt ────────────────────────────────────────────────────────────────────────────────────────


def count(claude, messages, **options):
    return claude.messages.count_tokens(model="tiny", messages=messages, **options).input_tokens


def test_tokens_are_counted_as_the_answer_counts_them(claude):
    usage = create(claude, system="be brief").usage
    assert count(claude, HELLO, system="be brief") == usage.input_tokens + usage.cache_read_input_tokens
    assert count(claude, HELLO, system="be brief") > count(claude, HELLO)


@pytest.mark.parametrize(
    ("messages", "equal"),
    [
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "the quick"}, {"type": "text", "text": " brown fox"}],
                }
            ],
            HELLO,
        ),
        (
            [{"role": "user", "content": "the"}, {"role": "user", "content": "fox"}],
            [{"role": "user", "content": "the\n\nfox"}],
        ),
    ],
)
def test_one_conversation_may_be_written_in_several_ways(claude, messages, equal):
    assert create(claude, messages=messages).content[0].text == create(claude, messages=equal).content[0].text


def test_a_turn_of_the_assistant_at_the_end_is_continued(claude, client):
    begun = [*HELLO, {"role": "assistant", "content": "jumps over"}]
    prompt = (
        "<|user|>the quick brown fox<|end|><|assistant|>jumps over"  # what the chat template writes, and the answer
    )
    completion = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    assert create(claude, messages=begun).content[0].text == completion.choices[0].text
    assert count(claude, begun) == completion.usage.prompt_tokens


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_parameter_that_anthropic_documents_is_obeyed_or_refused_by_name():
    for documented, body in ((MessageCreateParamsBase, MessagesBody), (MessageCountTokensParams, CountTokensBody)):
        names = set(typing.get_type_hints(documented)) - {"workspace_id"}  # which goes as a header
        assert names <= known_fields(body)


ANY_OBJECT = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens: this parameter is required"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0]: image is not supported here: this checkpoint takes text only",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"stop_sequences": ["\udfff"]}, "stop_sequences[0]"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"tools": [{"name": "f g", "input_schema": {"type": "object"}}]}, "tools"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17"),
        ({"stop_sequences": ["x" * 4097]}, "stop_sequences has 4097 characters"),
        ({"messages": [{"role": "assistant", "content": "7"}]}, "no user message"),
        (
            {"output_format": ANY_OBJECT, "output_config": {"format": ANY_OBJECT}},
            "output_config.format and output_format both define a format",
        ),
        ({"max_token": 3}, "did you mean 'max_tokens'?"),
        ({"messages": [{"role": "user", "content": "日" * 600}]}, "512"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_in_anthropics_shape(server, change, words):
    status, kind, message = refusal(server, **change)
    assert (status, kind) == (400, "invalid_request_error")
    assert words in message


def test_a_thread_is_refused_so_that_the_client_knows_to_send_all_turns_itself(server):
    answer = server.post("/v1/messages?beta=true", max_tokens=5, messages=HELLO, thread={"type": "create"})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_the_clients_errors_carry_the_kind_and_the_request_id(claude):
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(claude, model="claude-9")
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id


def test_wrong_methods_are_told_in_anthropics_shape(server):
    answer = fetch.get(f"{server.url}/v1/messages")
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_models_are_listed_for_this_client_too(claude):
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert claude.models.retrieve("tiny").created_at.year >= 2025
