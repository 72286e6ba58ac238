"""Conversations as clients and other servers send them back: an odd earlier turn never ends a session."""

import openai
import pytest
from pydantic import BaseModel

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import format_of
from penstock.server.openai.body_to_params import conversation
from penstock.server.openai.schema import ChatBody

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def read(*messages, template="<tool_call><think></think>{{ message.reasoning_content }}", **options):
    known = format_of(template)
    found = conversation(ChatBody.model_validate({"messages": list(messages), **options}), known)
    return found.template_input(known)[0], found


def assistant(**fields):
    """The second of three messages, as the template receives it."""
    messages, _ = read(USER, {"role": "assistant", **fields}, USER)
    return {name: value for name, value in messages[1].items() if name != "role"}


@pytest.mark.parametrize(
    "extra",
    [
        {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None},
        {"parsed": None},
        {"parsed": {"a": 1}, "id": "msg_1", "index": 0, "annotations": [{"type": "url_citation"}]},
        {"reasoning_content": None, "provider_specific_fields": {"a": 1}, "cache_control": {"type": "ephemeral"}},
        {"tool_calls": []},
    ],
)
def test_other_fields_of_an_answer_are_not_read(extra):
    assert assistant(content="hello", **extra) == {"content": "hello"}


@pytest.mark.parametrize(
    "reasoning",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_content": "", "reasoning": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"type": "reasoning.text", "text": "m"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
    ],
)
def test_reasoning_is_read_in_every_field_that_servers_use(reasoning):
    assert assistant(content="hello", **reasoning) == {"content": "hello", "reasoning_content": "hm"}


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}, {"content": []}, {"tool_calls": []}])
def test_a_turn_of_the_assistant_may_be_empty(empty):
    assert assistant(**empty) == {"content": ""}
    assert assistant(**empty, reasoning="hm") == {"content": "", "reasoning_content": "hm"}


def test_parts_have_what_the_agents_sdk_puts_into_them():
    part = {"type": "text", "text": "I look.", "annotations": [], "role": "assistant", "tool_calls": [CALL]}
    made = assistant(content=[part, {"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "Yes."}])
    assert made == {"content": "I look.\nNo.\nYes."}


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ('{"q": "x"}', {"q": "x"}),
        ({"q": "x"}, {"q": "x"}),
        (None, {}),
        ("", {}),
        ("null", {}),
        ('{"q": "cut', {"INVALID_JSON": '{"q": "cut'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ([1], {"INVALID_JSON": "[1]"}),
    ],
)
def test_arguments_of_earlier_calls_are_an_object_in_any_case(given, read_as):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given, "parsed_arguments": None}}
    (made,) = assistant(content=None, tool_calls=[call])["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": read_as}


def test_calls_of_other_forms_are_calls():
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    (made,) = assistant(tool_calls=[custom])["tool_calls"]
    assert made["function"] == {"name": "patch", "arguments": {"input": "x"}}
    asked = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    (_, turn, result), _ = read(USER, asked, {"role": "function", "name": "f", "content": "5"})
    (made,) = turn["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (result["role"], result["tool_call_id"], result["name"]) == ("tool", made["id"], "f")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_a_placeholder_stands_for_what_is_not_text_in_results_and_earlier_turns():
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {**RESULT, "content": [{"type": "text", "text": "shot:"}, IMAGE]}
    messages, _ = read({"role": "user", "content": [IMAGE]}, turn, result)
    left_out = "[image_url omitted: this model reads text]"
    assert messages[0]["content"] == left_out
    assert messages[2]["content"] == f"shot:\n{left_out}"


def test_what_is_not_text_is_refused_in_what_is_asked_now():
    for messages in ([{"role": "user", "content": [IMAGE]}], [USER, {"role": "assistant", "content": "x"}]):
        at = len(messages) - 1 if messages[-1]["role"] == "user" else 2
        asked = messages if at == 0 else [*messages, {"role": "user", "content": [IMAGE]}]
        with pytest.raises(InvalidRequestError, match="this checkpoint takes text only") as refused:
            read(*asked)
        assert refused.value.param == f"messages[{at}].content[0].image_url"


# ── reasoning, and the beginning of the answer ───────────────────────────────────────────────────────────────────────

HYBRID = "</think>{% if enable_thinking %}{% endif %}"


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "medium"}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "high"}}, {"enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"}, {"enable_thinking": False}),
    ],
)
def test_reasoning_is_controlled_by_every_field_that_clients_use(options, variables):
    _, found = read(USER, template=HYBRID, **options)
    assert found.variables == variables
    assert found.ignored == ()


def test_a_control_of_reasoning_that_the_model_does_not_have_is_named():
    _, found = read(USER, template="", reasoning_effort="high", thinking={"type": "enabled"})
    assert (found.variables, found.ignored) == ({}, ("reasoning_effort", "thinking"))


def test_controls_of_reasoning_that_contradict_each_other_are_refused():
    with pytest.raises(InvalidRequestError, match="contradicts"):
        read(USER, template=HYBRID, reasoning_effort="high", enable_thinking=False)


def test_the_last_message_of_the_assistant_can_begin_the_answer():
    begun = {"role": "assistant", "content": "The answer"}
    messages, found = read(USER, begun, continue_final_message=True, add_generation_prompt=False)
    assert (messages, found.prefill) == ([USER, *messages[1:]], "The answer")
    assert len(messages) == 1
    for refused in ([USER], [begun], [USER, begun | {"tool_calls": [CALL]}]):
        with pytest.raises(InvalidRequestError):
            read(*refused, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        read(USER, begun, continue_final_message=True, add_generation_prompt=True)


def test_tool_choice_has_the_words_of_other_servers():
    for word in ("any", {"type": "any"}, {"type": "required"}):
        assert read(USER, tools=[FUNCTION], tool_choice=word)[1].tools.choice == "required"
    for word in ("auto", {"type": "auto"}):
        assert read(USER, tools=[FUNCTION], tool_choice=word)[1].tools.choice == "auto"


# ── through OpenAI's client ──────────────────────────────────────────────────────────────────────────────────────────


class Anything(BaseModel):
    a: bool


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of `parsed`, by the client's own dump
def test_what_openais_helpers_return_can_be_sent_back(client: openai.OpenAI):
    asked = {"model": "tiny", "max_tokens": 4, "messages": [USER]}
    with client.chat.completions.stream(**asked) as stream:
        list(stream)
        streamed = stream.current_completion_snapshot.choices[0].message
    whole = client.chat.completions.create(**asked).choices[0].message
    parsed = client.chat.completions.parse(**asked | {"max_tokens": 100}, response_format=Anything).choices[0].message
    for message in (streamed, whole, parsed):
        again = {**asked, "messages": [USER, message, USER]}
        assert client.chat.completions.create(**again).choices[0].message.role == "assistant"
        dumped = {**asked, "messages": [USER, message.model_dump(warnings="none"), USER]}
        assert client.chat.completions.create(**dumped).choices[0].message.role == "assistant"
