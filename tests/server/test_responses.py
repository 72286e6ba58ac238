"""OpenAI's Responses, through OpenAI's own client, against a real server."""

import json
import typing

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter

from penstock.api.sampling_params import ResolvedParams
from penstock.server.openai.answers import Head
from penstock.server.openai.responses_answer import ResponsesAnswer
from penstock.server.openai.responses_items import OutputItems
from penstock.server.openai.responses_schema import ResponsesBody
from tests.support import fetch
from tests.support.bodies import known_fields

HELLO = "the quick brown fox"


def create(client, **options):
    return client.responses.create(
        **{"model": "tiny", "input": HELLO, "temperature": 0, "max_output_tokens": 12} | options
    )


def test_a_text_is_answered_with_its_usage(client):
    response = create(client)
    assert (response.object, response.model) == ("response", "tiny")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text
    assert (response.usage.output_tokens, response.usage.total_tokens) == (12, response.usage.input_tokens + 12)


def test_a_response_is_what_the_chat_of_it_is(client):
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": HELLO}], temperature=0, max_tokens=12
    )
    assert create(client).output_text == chat.choices[0].message.content


def test_a_streamed_response_is_the_same_response_in_pieces(client):
    whole = create(client)
    events = list(create(client, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 1
    final = events[-1].response
    assert "".join(pieces) == final.output_text == whole.output_text
    assert final.usage == whole.usage.model_copy(update={"input_tokens_details": final.usage.input_tokens_details})


def test_a_response_that_ends_by_itself_is_complete_as_the_clients_own_stream_reads_it(client):
    for _ in range(20):
        with client.responses.stream(model="tiny", input=HELLO, temperature=2, max_output_tokens=450) as stream:
            events = list(stream)
        if events[-1].type == "response.completed":
            response = stream.get_final_response()
            assert response.output_text == events[-1].response.output_text
            assert (response.status, response.incomplete_details) == ("completed", None)
            assert response.completed_at
            return
    raise AssertionError("no answer ended by itself")


def test_a_stream_is_the_sequence_of_events_that_openai_documents(client):
    events = list(create(client, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_logprobs_come_where_they_are_asked_for(client):
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = create(client, **options).output[0].content
    assert len(part.logprobs) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    streamed = [e for e in create(client, stream=True, **options) if e.type == "response.output_text.delta"]
    assert [entry.token for event in streamed for entry in event.logprobs] == [entry.token for entry in part.logprobs]
    assert create(client).output[0].content[0].logprobs == []


def test_a_conversation_goes_on_from_an_answer_as_it_came(client):
    first = create(client)
    turns = [{"role": "user", "content": HELLO}, *first.output, {"role": "user", "content": "and"}]
    second = create(client, input=turns, instructions="be brief", metadata={"a": "b"})
    text = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "nd"}]
    written = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": text},
    ]
    assert create(client, input=written).output_text == second.output_text
    assert (second.metadata, second.instructions) == ({"a": "b"}, "be brief")


def test_each_parameter_that_openai_documents_is_obeyed_or_refused_by_name():
    assert set(typing.get_type_hints(ResponseCreateParamsBase)) <= known_fields(ResponsesBody)


@pytest.mark.parametrize(
    ("change", "ignored"),
    [
        ({"client_metadata": {"session_id": "s"}}, "client_metadata"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"include": ["message.output_text.logprobs"]}, None),
        ({"reasoning": {"summary": "auto", "context": "auto", "mode": "pro"}}, "reasoning"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": None, "summary": None}}, None),
        ({"service_tier": "flex"}, "service_tier"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "disabled"}, None),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_tool_calls": 5}, "max_tool_calls"),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, "prompt_cache_key, prompt_cache_retention"),
        ({"safety_identifier": "s", "user": "u"}, "safety_identifier, user"),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, "stream_options.include_obfuscation"),
        ({"tools": [{"type": "web_search", "external_web_access": True}]}, "tools.type"),
        ({"background": False, "context_management": []}, None),
        ({"store": True}, None),
        ({"model": None}, None),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
    ],
)
def test_what_has_no_effect_is_accepted_and_named(server, change, ignored):
    answer = server.post("/v1/responses", **{"input": HELLO, "max_output_tokens": 2} | change)
    assert answer.status_code == 200, answer.text
    named = answer.headers.get("penstock-ignored")
    if ignored == "reasoning":
        assert named == "reasoning.summary, reasoning.context, reasoning.mode"
    else:
        assert named == ignored


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"image": {}}, "image"),
        ({"access_programs": {}}, "access_programs"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"tools": [{"type": "function", "name": "f"}], "include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "!" * 600}, "input"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_output_token": 5}, "max_output_token"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_the_parameter(server, change, param):
    content = json.dumps({"model": "tiny", "input": HELLO} | change)
    answer = fetch.post(f"{server.url}/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        create(client, model="gpt-9")


def test_a_sign_of_life_repeats_the_last_number_and_disturbs_no_client():
    head, body = Head("resp_1", 1, "tiny"), ResponsesBody.model_validate({"input": HELLO})
    params = ResolvedParams(1, 0.7, 0, 1.0, 0.0, 1, 50, 0, (2,), 1)
    answer = ResponsesAnswer(head, body, params, None, None, OutputItems("resp_1", {}), None)
    assert answer.keep_alive() == b""
    answer.begin_stream()
    name, data, *_ = answer.keep_alive().decode().split("\n")
    alive = json.loads(data.removeprefix("data: "))
    assert name == "event: response.in_progress"
    assert (alive["sequence_number"], alive["response"]["id"], alive["response"]["output"]) == (1, "resp_1", [])
    created = json.loads(answer.begin_stream().decode().split("\n")[1].removeprefix("data: "))
    state = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for data in (created, alive, alive):
        event = TypeAdapter(ResponseStreamEvent).validate_python(data)
        assert [one.type for one in state.handle_event(event)] == [data["type"]]
