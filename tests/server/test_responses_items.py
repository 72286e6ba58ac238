"""The items of a conversation in Responses, as messages of a chat template: any server's and any client's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ParsedResponse, ParsedResponseFunctionToolCall, ParsedResponseOutputMessage
from pydantic import TypeAdapter

from penstock.api.tools import template_id
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import format_of
from penstock.server.openai.responses_history import messages_of
from penstock.server.openai.responses_items_schema import Item

ITEMS = TypeAdapter(list[Item])
USER = {"role": "user", "content": "hi"}
ASKED = {"role": "user", "content": "hi"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


def read(*items, num_earlier=0):
    return messages_of(ITEMS.validate_python(list(items)), num_earlier, format_of(""))


def call(name="f", arguments="{}", id="call_1"):
    object_ = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": template_id(id), "type": "function", "function": {"name": name, "arguments": object_}}


def calls(*made, content="", **more):
    return {"role": "assistant", "content": content, "tool_calls": list(made)} | more


def result(text, id="call_1"):
    return {"role": "tool", "content": text, "tool_call_id": template_id(id)}


CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "5"}


def test_what_an_assistant_thought_said_and_called_in_one_turn_is_one_message():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]}
    other = CALL | {"call_id": "call_2"}
    assert read(USER, thought, said, CALL, other, OUTPUT, said) == [
        ASKED,
        calls(call(), call(id="call_2"), content="Look:", reasoning_content="hm"),
        result("5"),
        {"role": "assistant", "content": "Look:"},
    ]
    assert read(USER, CALL, said, OUTPUT) == [ASKED, calls(call(), content="Look:"), result("5")]
    assert read(USER, thought, thought, CALL)[1:] == [calls(call(), reasoning_content="hm\n\nhm")]


@pytest.mark.parametrize(
    ("item", "messages"),
    [
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "gAAA"},
            [{"role": "assistant", "content": "", "reasoning_content": "hm"}],
        ),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, []),
        ({"type": "reasoning", "summary": [], "content": None, "status": None, "id": None}, []),
        (CALL | {"namespace": "agents", "status": None, "id": None}, [calls(call("agents__f"))]),
        (CALL | {"namespace": "mcp__files__"}, [calls(call("mcp__files__f"))]),
        (CALL | {"arguments": {"a": 1}}, [calls(call(arguments={"a": 1}))]),
        (CALL | {"arguments": '{"a": "cut'}, [calls(call(arguments={"INVALID_JSON": '{"a": "cut'}))]),
        (CALL | {"arguments": "[1]"}, [calls(call(arguments={"INVALID_JSON": "[1]"}))]),
        (CALL | {"arguments": None, "parsed_arguments": None}, [calls(call())]),
        (
            {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "*** x"},
            [calls(call("apply_patch", {"input": "*** x"}))],
        ),
        (
            {"type": "local_shell_call", "call_id": "call_1", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            [calls(call("local_shell", {"command": ["ls"]}))],
        ),
        (
            {"type": "shell_call", "call_id": "call_1", "action": {"commands": ["ls"]}},
            [calls(call("shell", {"commands": ["ls"]}))],
        ),
        (
            {"type": "apply_patch_call", "call_id": "call_1", "status": "completed", "operation": {"type": "x"}},
            [calls(call("apply_patch", {"type": "x"}))],
        ),
        (
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
            [{"role": "assistant", "content": "[web_search_call omitted: this model reads text]"}],
        ),
        (
            {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "AAAA"},
            [{"role": "assistant", "content": "[image_generation_call omitted: this model reads text]"}],
        ),
        (
            {"type": "compaction", "encrypted_content": "gAAA"},
            [{"role": "assistant", "content": "[compaction omitted: this model reads text]"}],
        ),
        ({"type": 5}, [{"role": "assistant", "content": "[5 omitted: this model reads text]"}]),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            [{"role": "assistant", "content": "No."}],
        ),
        ({"role": "assistant", "content": None}, [{"role": "assistant", "content": ""}]),
        ({"type": "message", "role": "developer", "content": "x"}, [{"role": "system", "content": "x"}]),
    ],
)
def test_each_item_of_an_earlier_turn_is_read(item, messages):
    assert read(USER, item) == [ASKED, *messages]


def test_a_placeholder_stands_in_the_turn_of_its_place():
    search = {"type": "web_search_call", "id": "ws_1"}
    words = "[web_search_call omitted: this model reads text]"
    assert read(USER, CALL, search, OUTPUT) == [ASKED, calls(call(), content=words), result("5")]
    assert read(USER, search, search)[1:] == [{"role": "assistant", "content": f"{words}\n{words}"}]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("5", "5"),
        (None, ""),
        ([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a"}, PICTURE], "a[input_image omitted: this model reads text]"),
        ({"type": "computer_screenshot", "image_url": "x"}, "[computer_screenshot omitted: this model reads text]"),
        ({"stdout": "é"}, '{"stdout": "é"}'),
        ([{"stdout": "x", "outcome": {"type": "exit"}}], '[{"stdout": "x", "outcome": {"type": "exit"}}]'),
        ([1, "a"], '[1, "a"]'),
        (7, "7"),
    ],
)
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output", "shell_call_output"])
def test_a_result_is_a_text_parts_or_any_json(kind, output, text):
    given = {"type": kind, "call_id": "call_1", "output": output}
    assert read(USER, CALL, given) == [ASKED, calls(call()), result(text)]


def test_the_result_of_a_local_shell_names_its_call_by_call_id_or_id():
    made = {"type": "local_shell_call", "call_id": "call_1", "action": {"command": ["ls"]}}
    for name in ("id", "call_id"):
        given = {"type": "local_shell_call_output", name: "call_1", "output": "x"}
        assert read(USER, made, given)[-1] == result("x")


def test_a_call_without_a_result_stays_and_a_result_without_a_call_gets_one():
    assert read(USER, CALL, USER) == [ASKED, calls(call()), ASKED]
    assert read(USER, OUTPUT) == [ASKED, calls(call("tool")), result("5")]
    assert read(USER, OUTPUT | {"name": "g"})[1] == calls(call("g"))
    nameless = {"type": "function_call_output", "output": "5"}
    assert read(USER, nameless) == [ASKED, calls(call("tool", id="")), result("5", id="")]


def test_what_is_no_text_is_a_placeholder_in_earlier_turns_and_refused_in_what_is_asked_now():
    seen = {"role": "user", "content": [{"type": "input_text", "text": "see: "}, PICTURE]}
    words = "see: [input_image omitted: this model reads text]"
    assert read(seen, {"role": "assistant", "content": "x"}, USER)[0]["content"] == words
    assert read(seen, USER, num_earlier=1)[0]["content"] == words
    with pytest.raises(InvalidRequestError, match="input_image is not supported here") as refused:
        read(USER, CALL, OUTPUT, seen)
    assert refused.value.param == "input[3].content[1]"
    with pytest.raises(InvalidRequestError) as refused:
        read(USER, CALL, OUTPUT, seen, num_earlier=3)
    assert refused.value.param == "input[0].content[1]"


def test_what_openais_helpers_return_can_be_sent_back():
    message = ParsedResponseOutputMessage.construct(
        id="msg_1",
        type="message",
        role="assistant",
        status="completed",
        phase=None,
        content=[{"type": "output_text", "text": "x", "annotations": [], "logprobs": [], "parsed": {"a": 1}}],
    )
    made = ParsedResponseFunctionToolCall.construct(**CALL, id="fc_1", parsed_arguments={"a": 1}, status="completed")
    response = ParsedResponse.construct(output=[message, made])
    items = [item.model_dump() for item in response.output]
    assert "parsed" in json.dumps(items)
    assert read(USER, *items) == [ASKED, calls(call(), content="x")]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
UNKNOWN = st.fixed_dictionaries(
    {"type": st.sampled_from(["x_call", "x_output", "x_call_output", "program", "", "mcp_call"]) | VALUES},
    optional=dict.fromkeys(("id", "call_id", "name", "output", "action", "arguments", "content", "role"), VALUES),
).filter(lambda item: item["type"] is not None)


@given(st.lists(UNKNOWN | st.sampled_from([CALL, OUTPUT]), max_size=6))
def test_no_unknown_item_fails_and_every_result_follows_a_call_of_its_id(items):
    called = set()
    for message in read(USER, *items):
        called |= {one["id"] for one in message.get("tool_calls", ())}
        assert isinstance(message["content"], str)
        assert message["role"] != "tool" or message["tool_call_id"] in called
