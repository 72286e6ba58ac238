"""What Claude Code, Anthropic's SDKs and others send: fields without effect, and earlier turns as they come back."""

import pytest

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import format_of
from penstock.server.anthropic.body_to_params import conversation
from penstock.server.anthropic.schema import CountTokensBody, MessagesBody

USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
HYBRID = "<tool_call></think>{% if enable_thinking %}{% endif %}"
GRADED = "<tool_call></think>{{ reasoning_effort }}"
PLAIN = "<tool_call>"


def read(*messages, template=HYBRID, **options):
    known = format_of(template)
    body = MessagesBody.model_validate({"max_tokens": 5, "messages": list(messages), **options})
    found = conversation(body, known)
    return found.template_input(known)[0], found


def result(content, **fields):
    """The result of a call as the template receives it."""
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}
    messages, _ = read(USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [block]})
    assert messages[2]["role"] == "tool"
    return messages[2]["content"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("5", "5"),
        ([{"type": "text", "text": "5", "citations": None}], "5"),
        ([{"type": "text", "text": "shot:"}, IMAGE], "shot:[image omitted: this model reads text]"),
        ([{"type": "tool_reference", "tool_name": "g"}], "[tool: g]"),
        ([{"type": "document", "source": {"type": "text", "data": "abc"}, "title": "t"}], "t\n\nabc"),
        ([{"type": "document", "source": {"type": "base64"}}], "[document omitted: this model reads text]"),
        (
            [{"type": "search_result", "source": "https://a", "content": [{"type": "text", "text": "5"}]}],
            "https://a\n5",
        ),
        ([{"type": "audio", "source": "https://a"}], "[audio omitted: this model reads text]"),
        ({"type": "web_search_tool_result_error"}, '{"type": "web_search_tool_result_error"}'),
        ([1, "a"], '[1, "a"]'),
    ],
)
def test_a_result_of_any_kind_is_read(content, text):
    assert result(content) == text
    assert result(content, is_error=True) == f"Error: {text}"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "thinking", "thinking": "hm", "signature": "x"}, {"reasoning_content": "hm"}),
        ({"type": "thinking", "thinking": ""}, {}),
        ({"type": "redacted_thinking", "data": "abc"}, {}),
        ({"type": "text", "text": "", "citations": [{"type": "char_location"}]}, {}),
        ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, None),
        ({"type": "kind_of_tomorrow", "x": 1}, None),
    ],
)
def test_any_block_of_an_earlier_turn_is_taken(block, message):
    turn = {"role": "assistant", "content": [block, {"type": "text", "text": "5"}]}
    messages, _ = read(USER, turn, USER)
    if message is None:
        assert messages[1]["content"] == f"[{block['type']} omitted: this model reads text]5"
    else:
        assert messages[1] == {"role": "assistant", "content": "5", **message}


@pytest.mark.parametrize(
    ("input", "arguments"),
    [({"a": 1}, {"a": 1}), (None, {}), ({}, {}), ("cut", {"INVALID_JSON": '"cut"'}), ([1], {"INVALID_JSON": "[1]"})],
)
def test_the_input_of_an_earlier_call_is_an_object_in_any_case(input, arguments):
    turn = {"role": "assistant", "content": [USE | {"input": input, "caller": {"type": "direct"}}]}
    done = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}
    (call,) = read(USER, turn, done)[0][1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_an_image_is_refused_in_what_is_asked_now_and_left_out_of_earlier_turns():
    asked = {"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE]}
    with pytest.raises(InvalidRequestError, match="image is not supported") as refused:
        read(asked)
    assert refused.value.param == "messages[0].content[1]"
    messages, _ = read(asked, {"role": "assistant", "content": "5"}, USER)
    assert messages[0]["content"] == "what?[image omitted: this model reads text]"


@pytest.mark.parametrize("billing", ["x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"])
def test_claude_codes_billing_block_is_left_out_of_the_prompt(billing):
    rest = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    wanted = [{"role": "system", "content": "You are an agent."}, USER]
    assert read(USER, system=[{"type": "text", "text": billing}, rest])[0] == wanted
    assert read(USER, system=f"{billing}\nYou are an agent.")[0] == wanted
    assert read(USER, system=[{"type": "text", "text": billing}])[0] == [USER]


# ── fields that agents always send ───────────────────────────────────────────────────────────────────────────────────

CLAUDE_CODE = {
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "{}"},
}


@pytest.mark.parametrize(
    ("template", "variables", "ignored"),
    [
        (HYBRID, {"enable_thinking": True}, ()),
        (GRADED, {"reasoning_effort": "high"}, ()),
        (PLAIN, {}, ("output_config.effort",)),
    ],
)
def test_claude_codes_fields_are_taken_on_any_model(template, variables, ignored):
    _, found = read(USER, template=template, **CLAUDE_CODE)
    assert (found.variables, found.ignored) == (variables, ignored)


@pytest.mark.parametrize(
    ("thinking", "template", "variables", "ignored"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, HYBRID, {"enable_thinking": True}, ()),
        ({"type": "enabled", "budget_tokens": 1024}, PLAIN, {}, ("thinking",)),
        ({"type": "disabled"}, HYBRID, {"enable_thinking": False}, ()),
        ({"type": "disabled"}, PLAIN, {}, ()),
        ({"type": "disabled"}, "</think>", {}, ("thinking",)),
        ({"type": "adaptive", "display": "omitted"}, HYBRID, {}, ()),
    ],
)
def test_thinking_is_what_anthropic_defines(thinking, template, variables, ignored):
    _, found = read(USER, template=template, thinking=thinking)
    assert (found.variables, found.ignored) == (variables, ignored)


def test_edits_that_would_clear_results_are_refused_and_those_of_thinking_named():
    edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    assert read(USER, context_management={"edits": [edit]})[1].ignored == ("context_management",)
    assert read(USER, context_management={"edits": []})[1].ignored == ()
    with pytest.raises(InvalidRequestError, match="clear_tool_uses_20250919") as refused:
        read(USER, context_management={"edits": [edit, {"type": "clear_tool_uses_20250919"}]})
    assert refused.value.param == "context_management.edits[1].type"


def test_anthropics_own_tools_are_left_out_and_named():
    own = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    _, found = read(USER, tools=[TOOL | {"eager_input_streaming": False, "defer_loading": True}, own])
    assert [function.name for function in found.tools.functions] == ["f"]
    assert found.ignored == ("tools.type",)
    with pytest.raises(InvalidRequestError, match="web_search"):
        read(USER, tools=[TOOL, own], tool_choice={"type": "tool", "name": "web_search"})


def test_tokens_are_counted_with_every_field_of_a_message():
    given = {"messages": [USER], "max_tokens": 5, "stream": True, "temperature": 1, **CLAUDE_CODE}
    body = CountTokensBody.model_validate(given)
    assert {"max_tokens", "stream", "temperature"} <= body.ignored_fields().hints.keys()
    assert not body.ignored_fields().unknown
