"""OpenAI's Responses, through OpenAI's own client, against a real server."""

import json
import typing

import openai
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from penstock.server.openai.responses_schema import ResponsesBody
from tests import fetch

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
    names = set(typing.get_type_hints(ResponseCreateParamsBase))
    assert names <= set(ResponsesBody.model_fields) | set(ResponsesBody.NOT_OBEYED)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"instructions": "\ud800"}, "instructions"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "\ud800"}]}, "input[0].output"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"tools": [{"type": "function", "name": "f"}], "include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"input": "!" * 600}, "input"),
        ({"max_tokens": 5}, "max_tokens"),
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
