"""Every format of calls: what it reads, and that it does not matter in what pieces the text comes."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.tools import Function
from penstock.parsers.conversation import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    FORMATS,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL_BY_NAME,
    MISTRAL_LIST,
    QWEN_TAGS,
    ChatFormat,
    Plain,
    format_of,
)
from penstock.parsers.parts import Reasoning, Text, ToolCall, put_together
from penstock.parsers.reasoning import KINDS
from penstock.parsers.tagged import ALL_TYPES, types_of_property

THINK = KINDS[0]
TOOLS = ("get_weather", "f")
ANYTHING = {"type": "object"}
TAGGED = (QWEN_TAGS, GLM)
"""Formats whose arguments are text between tags."""
ARGUMENTS = {"city": "Zürich 🏔", "nested": {"brace": '}{"</tool_call>[TOOL_CALLS]', "list": [1, [2.5, None, True]]}}


def parser(tools, thinks=None, prompt_end="", names=TOOLS):
    functions = [Function(name, None, ANYTHING) for name in names]
    return ChatFormat(tools, thinks, frozenset()).parser(functions, prompt_end)


def read(text, tools, thinks=None, prompt_end="", names=TOOLS):
    """The parts of a text that comes in one piece; in single characters they must be the same."""
    whole, single = (parser(tools, thinks, prompt_end, names) for _ in range(2))
    parts = put_together([*whole.feed_text(text), *whole.finish()])
    pieces = [piece for character in text for piece in single.feed_text(character)]
    assert put_together([*pieces, *single.finish()]) == parts
    return parts


def write(tools, calls):
    """Calls as a model of this format writes them."""
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    if tools is HERMES:
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if tools is LLAMA:
        return "<|python_tag|>" + "; ".join(body.replace('"arguments"', '"parameters"', 1) for body in bodies)
    if tools is MISTRAL_LIST:
        return f"[TOOL_CALLS] [{', '.join(bodies)}]"
    if tools in (DEEPSEEK, DEEPSEEK_FENCED):
        return write_deepseek(calls, tools is DEEPSEEK_FENCED)
    if tools is GEMMA:
        return "".join(f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>" for name, arguments in calls)
    if tools is HARMONY:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
            for name, arguments in calls
        )
    if tools in TAGGED:
        return "\n".join(write_tagged(tools, *call) for call in calls)
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls)


def gemma_value(value):
    """Likewise, a value."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def write_tagged(tools, name, arguments):
    """Likewise, one call."""
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    if tools is GLM:
        pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
        return f"<tool_call>{name}\n{pairs}</tool_call>"
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def write_deepseek(calls, fenced):
    """Likewise."""
    bodies = [
        f"function<｜tool▁sep｜>{name}\n```json\n{body}\n```" if fenced else f"{name}<｜tool▁sep｜>{body}"
        for name, body in ((name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls)
    ]
    listed = ("\n" if fenced else "").join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{listed}<｜tool▁calls▁end｜>"


def call(name, arguments):
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


formats = pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
JSON_FORMATS = [tools_format for tools_format in FORMATS if tools_format not in (*TAGGED, GEMMA)]
formats_within_text = pytest.mark.parametrize(
    "tools", [tools_format for tools_format in FORMATS if tools_format is not HARMONY], ids=lambda one: one.name
)
formats_of_json = pytest.mark.parametrize("tools", JSON_FORMATS, ids=lambda one: one.name)


# ── what every format reads ──────────────────────────────────────────────────────────────────────────────────────────


@formats
def test_a_call_is_read_with_its_arguments_as_they_were_written(tools):
    assert read(write(tools, [("get_weather", ARGUMENTS)]), tools) == [call("get_weather", ARGUMENTS)]


@formats
def test_several_calls_are_read_in_their_order(tools):
    calls = [("get_weather", {"city": "Rome"}), ("f", {}), ("get_weather", {"city": ""})]
    assert read(write(tools, calls), tools) == [call(*one) for one in calls]


@formats_within_text
def test_text_around_calls_is_kept_without_the_white_space_next_to_them(tools):
    text = "I will look.\n\n" + write(tools, [("f", {})]) + "\nDone.\n"
    first, called, last = read(text, tools)
    assert (first, called, last.text.strip()) == (Text("I will look."), call("f", {}), "Done.")


@formats
def test_text_without_calls_is_left_as_it_is(tools):
    for text in ("", " ", "\n Hello {world}; [x] <tool> \n", "日本語 🙂"):
        assert read(text, tools) == ([Text(text)] if text else [])


@formats
def test_a_call_of_a_tool_that_is_not_offered_is_a_call_if_any_is(tools):
    calls = [("g.h-1_", {"a": 1, "b": "x", "c": {"d": [True, None, 0.5]}}), ("f", {}), ("x" * 128, {})]
    text = write(tools, calls)
    assert read(text, tools) == [call(*one) for one in calls]


@formats
@pytest.mark.parametrize("name", ["x" * 129, "a$b", "", "é", "a/b"])
def test_a_call_by_no_valid_name_is_text(tools, name):
    text = write(tools, [(name, {"a": 1})])
    assert "".join(part.text for part in read(text, tools)).split() == text.removesuffix("<|call|>").split()


def test_without_a_mark_only_a_call_of_an_offered_tool_is_one():
    for name, parts in (("f", [ToolCall("f", "{}")]), ("g", [Text('{"name": "g", "parameters": {}}')])):
        assert read(f'{{"name": "{name}", "parameters": {{}}}}', LLAMA) == parts
    both = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    assert read(both, LLAMA) == [ToolCall("f", "{}"), Text('; {"name": "g", "parameters": {}}')]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *(('{"b": [1]}', '{"b": [1]}'), ("[]", "[]"), ("-1.5e3", "-1.5e3"), ("false", "false"), ("null", "null")),
        *(("Paris", '"Paris"'), ("", '""'), ("True", '"True"'), ('"q"', '"\\"q\\""'), ("{broken", '"{broken"')),
    ],
)
def test_values_of_an_unknown_tool_between_tags_are_json_where_they_read_as_json_and_else_strings(value, written):
    for tools in TAGGED:
        assert read(write(tools, [("g", {"a": value})]), tools) == [ToolCall("g", f'{{"a": {written}}}')]


@formats_of_json
def test_arguments_that_are_cut_off_are_told_as_far_as_they_go(tools):
    whole = write(tools, [("f", {"a": ["b", {"c": "d"}]})])
    parts = read(whole[: whole.index('"c"') + 2], tools)
    assert parts == [ToolCall("f", '{"a": ["b", {"c')]


@formats
def test_a_call_that_is_cut_off_before_its_name_is_clear_is_text(tools):
    whole = write(tools, [("get_weather", {})])
    cut = whole[: whole.index("get_weather") + 3]
    assert read(cut, tools) == [Text(cut)]


@formats_within_text
def test_nothing_that_a_model_writes_about_marks_is_lost(tools):
    for mark in {mark for tools_format in FORMATS for mark in tools_format.marks}:
        for text in (
            mark,
            f"The mark {mark} is one",
            f"{mark}{{",
            f'{mark}{{"name": 5}}',
            mark[:-1],
            f"{mark}\n[{{}}]",
        ):
            shown = "".join(part.text for part in read(text, tools))
            assert shown.split() == text.split()


# ── each format's own ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [ToolCall("f", '{"a": 1}')]),
        ('<tool_call>{"id": [{}], "name": "f", "x": "}", "arguments": {}}</tool_call>', [ToolCall("f", "{}")]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', [ToolCall("f", '{"a": 1'), Text("x")]),
        ('<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>', [ToolCall("f", "{'a': 1}")]),
        ('<tool_call>{"name": "f", "arguments": {}}', [ToolCall("f", "{}")]),
        ('<tool_call>\n<tool_call>{"name": "f"}</tool_call>', [Text("<tool_call>"), ToolCall("f", "{}")]),
        ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', [ToolCall("f", "{}")]),
    ],
)
def test_hermes(text, parts):
    assert read(text, HERMES) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', [ToolCall("f", '{"a": 1}')]),
        ('\n{"type": "function", "name": "f", "parameters": {}}\n', [ToolCall("f", "{}")]),
        ('{"name": "f", "parameters": {}};\n{"name": "f", "parameters": {}}', [ToolCall("f", "{}")] * 2),
        ('{"name": "Alice", "age": 30}', [Text('{"name": "Alice", "age": 30}')]),
        ('{"name": "f"', [Text('{"name": "f"')]),
        ('See {"name": "f", "parameters": {}}', [Text('See {"name": "f", "parameters": {}}')]),
        ('Now <|python_tag|>{"name": "f", "parameters": {}}', [Text("Now"), ToolCall("f", "{}")]),
        ('<|python_tag|>search.call(query="x")', [Text('<|python_tag|>search.call(query="x")')]),
        ('{"name": "f", "parameters": {}} and so on', [ToolCall("f", "{}"), Text("and so on")]),
    ],
)
def test_llama(text, parts):
    assert read(text, LLAMA) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789"}]', [ToolCall("f", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [ToolCall("f", '{"a": 1}')]),
        ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f {}', [ToolCall("f", '{"a": 1}'), ToolCall("f", "{}")]),
        ("[TOOL_CALLS] []", [Text("[TOOL_CALLS] []")]),
        ("[TOOL_CALLS]f", [Text("[TOOL_CALLS]f")]),
        (f"[TOOL_CALLS]{'f' * 200}", [Text(f"[TOOL_CALLS]{'f' * 200}")]),
    ],
)
def test_mistral(text, parts):
    assert read(text, MISTRAL_LIST) == read(text, MISTRAL_BY_NAME) == parts


TYPED = Function(
    "f",
    None,
    {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "either": {"type": ["string", "null"]},
            "list": {"$ref": "#/$defs/list"},
            "flag": {"enum": [True, False]},
        },
        "$defs": {"list": {"anyOf": [{"type": "array"}, {"type": "null"}]}},
    },
)


def read_typed(text, tools):
    whole, single = (ChatFormat(tools, None, frozenset()).parser([TYPED], "") for _ in range(2))
    parts = put_together([*whole.feed_text(text), *whole.finish()])
    assert put_together([*(piece for one in text for piece in single.feed_text(one)), *single.finish()]) == parts
    return parts


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"text": "12"}, '{"text": "12"}'),
        ({"text": 'a "quoted"\n\tline\n'}, '{"text": "a \\"quoted\\"\\n\\tline\\n"}'),
        ({"text": " {}", "count": 5}, '{"text": " {}", "count": 5}'),
        ({"count": "many"}, '{"count": "many"}'),
        ({"either": None}, '{"either": null}'),
        ({"either": "5"}, '{"either": "5"}'),
        ({"list": [1, {"a": "b"}]}, '{"list": [1, {"a": "b"}]}'),
        ({"flag": "True"}, '{"flag": true}'),
        ({"flag": True, "other": 1.5}, '{"flag": true, "other": 1.5}'),
        ({"list": "NaN"}, '{"list": "NaN"}'),
        ({}, "{}"),
    ],
)
def test_the_schema_tells_strings_between_tags_from_json(arguments, written):
    for tools in TAGGED:
        assert read_typed(write(tools, [("f", arguments)]), tools) == [ToolCall("f", written)]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_string_between_tags_is_read_as_it_was_written(text):
    for tools in TAGGED:
        (called,) = read_typed(write(tools, [("f", {"text": text})]), tools)
        assert json.loads(called.arguments) == {"text": text}


@pytest.mark.parametrize(
    ("text", "tools", "parts"),
    [
        ("<tool_call>\n<function=f>\n<parameter=text>\nab", QWEN_TAGS, [ToolCall("f", '{"text": "ab')]),
        ("<tool_call>\n<function=f>\n<parameter=count>\n12", QWEN_TAGS, [ToolCall("f", '{"count": ')]),
        (
            "<tool_call><function=f><parameter=count>1</parameter>",
            QWEN_TAGS,
            [ToolCall("f", '{"count": 1')],
        ),
        ("<tool_call>\n<function=f>\n</tool_call>x", QWEN_TAGS, [ToolCall("f", "{}"), Text("x")]),
        ("<tool_call>\n<function=g>", QWEN_TAGS, [Text("<tool_call>\n<function=g>")]),
        (
            "<tool_call>f<arg_key>text</arg_key><arg_value>a</arg_value></tool_call>",
            GLM,
            [ToolCall("f", '{"text": "a"}')],
        ),
        ("<tool_call>f</tool_call>", GLM, [ToolCall("f", "{}")]),
        ("<tool_call>f and so on", GLM, [Text("<tool_call>f and so on")]),
        ("<tool_call>f\n<arg_key>text</arg_key>oops", GLM, [ToolCall("f", "{"), Text("oops")]),
    ],
)
def test_tagged(text, tools, parts):
    assert read_typed(text, tools) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", [ToolCall("f", "{}")]),
        (
            "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜> {}\n<｜tool▁call▁end｜>\nx",
            [ToolCall("f", "{}"), Text("x")],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}",
            [ToolCall("f", "{}"), ToolCall("g", "{}")],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}",
            [Text("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}")],
        ),
    ],
)
def test_deepseek(text, parts):
    assert read(text, DEEPSEEK) == read(text, DEEPSEEK_FENCED) == parts


FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<|channel|>analysis<|message|>Well.<|end|>{FINAL}Yes.<|return|>", [Reasoning("Well."), Text("Yes.")]),
        (f"<|channel|>analysis<|message|>Well.<|end|>{FINAL}Yes", [Reasoning("Well."), Text("Yes")]),
        ("<|channel|>final<|message|>a <|b<| c", [Text("a <|b<| c")]),
        ("<|channel|>analysis<|message|>cut", [Reasoning("cut")]),
        (" to=functions.f<|channel|>commentary<|constrain|>json<|message|>{}", [ToolCall("f", "{}")]),
        ('<|channel|>commentary to=f <|constrain|>json<|message|>{"a"', [ToolCall("f", '{"a"')]),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            "<|message|>{}<|call|>",
            [Text("I look."), ToolCall("f", "{}")],
        ),
        (
            f"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>{FINAL}c",
            [Reasoning("a\nb"), Text("c")],
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}",
            [Reasoning("a"), ToolCall("g", "{}")],
        ),
        ("Just text.<|end|>", [Text("Just text.")]),
        (f"Just text.<|end|>{FINAL}More.", [Text("Just text.\nMore.")]),
        (f"<|channel|>commentary<|message|>I look.<|end|>{FINAL} Done.", [Text("I look.\n Done.")]),
        (f"<|channel|>final<|message|><|end|>{FINAL}Done.", [Text("Done.")]),
        (
            "<|channel|>analysis to=functions.f <|message|>{}<|call|><|start|>assistant<|channel|>analysis<|message|>b",
            [ToolCall("f", "{}"), Reasoning("b")],
        ),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [ToolCall("python", "1 + 1")]),
        (
            '<|channel|>commentary to=f<|message|> {"a": "<|call|> <|start|>"} <|call|>',
            [ToolCall("f", '{"a": "<|call|> <|start|>"} ')],
        ),
        (
            "<|channel|>commentary to=f<|message|>{<|end|><|start|>assistant<|channel|>final<|message|>b",
            [ToolCall("f", "{"), Text("b")],
        ),
        ("<|channel|>commentary to=f<|message|>1 < 2<|call|>", [ToolCall("f", "1 < 2")]),
        ("<|start|><|start|>x", [Text("<|start|><|start|>x")]),
        ("<|channel|>fin", [Text("<|channel|>fin")]),
        ("<b>x</b>", [Text("<b>x</b>")]),
    ],
)
def test_harmony(text, parts):
    assert read(text, HARMONY, KINDS[3]) == parts


def test_harmony_is_read_without_tools_too():
    text = f"<|channel|>analysis<|message|>a<|end|>{FINAL}b"
    assert read(text, HARMONY, KINDS[3], names=()) == [Reasoning("a"), Text("b")]
    for channel, kind in (("analysis", Reasoning), ("commentary", Text)):
        called = f"<|channel|>{channel} to=python<|message|>1 + 1<|call|>"
        assert read(called, HARMONY, KINDS[3], names=()) == [
            kind("1 + 1" if kind is Reasoning else called.removesuffix("<|call|>"))
        ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('<|tool_call>call:f{a:<|"|>x "y"\n<|"|>,b:1}<tool_call|>', [ToolCall("f", '{"a": "x \\"y\\"\\n", "b": 1}')]),
        (
            '<|tool_call>call:f{a:[null, <|"|><|"|>],b:{c:1}}<tool_call|>.',
            [ToolCall("f", '{"a": [null, ""], "b": {"c": 1}}'), Text(".")],
        ),
        ('<|tool_call>call:f{<|"|>a b<|"|>:x}<tool_call|>', [ToolCall("f", '{"a b": "x"}')]),
        ('<|tool_call>call:f{a:<|"|>cut', [ToolCall("f", '{"a": "cut')]),
        ("<|tool_call>call:f{a:1", [ToolCall("f", '{"a": ')]),
        ("<|tool_call>call:f{a:1,b:2<tool_call|>x", [ToolCall("f", '{"a": 1, "b": 2'), Text("x")]),
        ("<|tool_call>f{}", [Text("<|tool_call>f{}")]),
    ],
)
def test_gemma(text, parts):
    assert read(text, GEMMA) == parts


def test_the_label_of_reasoning_is_no_part_of_it():
    gemma = KINDS[2]
    assert read("<|channel>thought\nHm.<channel|>Yes.", GEMMA, gemma) == [Reasoning("Hm."), Text("Yes.")]
    assert read("Hm.<channel|>Yes.", GEMMA, gemma, "<|channel>thought\n") == [Reasoning("Hm."), Text("Yes.")]
    assert read("<|channel>x", GEMMA, gemma) == [Text("<|channel>x")]


# ── reasoning ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "prompt_end", "parts"),
    [
        ("<think>\nWell ...\n\nso\n</think>\n\nYes.\n", "", [Reasoning("Well ...\n\nso"), Text("Yes.")]),
        ("\n<think>a</think>b", "", [Reasoning("a"), Text("b")]),
        ("a\n</think>\n\nb", "<|im_start|>assistant\n<think>\n", [Reasoning("a"), Text("b")]),
        ("a", "assistant\n<think>\n\n</think>\n\n", [Text("a")]),
        ("<think>\n\n</think>\n\nb", "", [Text("b")]),
        ("<think>\na\n ", "", [Reasoning("a")]),
        ("a </thin", "<think>", [Reasoning("a </thin")]),
        ("No. <think>a</think>", "", [Text("No. <think>a</think>")]),
        ("<thin", "", [Text("<thin")]),
        (" \n", "", [Text(" \n")]),
    ],
)
def test_reasoning_at_the_beginning_is_told_apart(text, prompt_end, parts):
    assert read(text, HERMES, THINK, prompt_end, names=()) == parts
    assert read(text, HERMES, THINK, prompt_end) == parts


@formats_within_text
def test_calls_follow_reasoning_and_none_is_read_inside_of_it(tools):
    written = write(tools, [("f", {"a": 1})])
    assert read(f"<think>\nSay {written}?\n</think>\n\n{written}", tools, THINK) == [
        Reasoning(f"Say {written}?"),
        call("f", {"a": 1}),
    ]
    assert read(written, tools, THINK) == [call("f", {"a": 1})]


def test_what_begins_like_reasoning_may_still_be_a_call():
    text = '<th<tool_call>{"name": "f"}</tool_call>'
    assert read(text, HERMES, THINK) == [Text("<th"), ToolCall("f", "{}")]


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────────

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
MARKS = [mark for tools_format in FORMATS for mark in tools_format.marks] + ["<think>", "</think>"]
SCRAPS = st.sampled_from(
    [*MARKS, '{"name": "f"', '"arguments": ', "{", "}", '"', "\\", "[", "]", ",", ";", "\n", " ", "f"]
)


@st.composite
def answers(draw):
    """Anything that a model may write: calls, calls gone wrong, marks, text."""
    tools = draw(st.sampled_from(FORMATS))
    calls = st.lists(st.tuples(st.sampled_from([*TOOLS, "g"]), OBJECTS), min_size=1, max_size=2)
    whole = calls.map(lambda made: write(tools, made))
    broken = st.tuples(whole, st.integers(0, 200), st.integers(0, 3)).map(
        lambda given: given[0][: given[1]] + given[0][given[1] + given[2] :]
    )
    pieces = draw(st.lists(whole | broken | SCRAPS | st.text(max_size=10), max_size=8))
    return tools, "".join(pieces)


@given(answers(), st.sampled_from([None, *KINDS]), st.sampled_from(["", "<think>\n"]), st.lists(st.integers(0, 400)))
def test_every_split_of_a_text_gives_the_same_parts_and_at_each_cut_the_same_so_far(answer, thinks, prompt_end, cuts):
    tools, text = answer
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    split, start, pieces = parser(tools, thinks, prompt_end), 0, []
    for end in ends:
        pieces += split.feed_text(text[start:end])
        start = end
        assert put_together(pieces) == put_together(parser(tools, thinks, prompt_end).feed_text(text[:end]))
    whole = parser(tools, thinks, prompt_end)
    assert put_together([*pieces, *split.finish()]) == put_together([*whole.feed_text(text), *whole.finish()])


@given(st.data())
def test_whatever_the_arguments_calls_are_read_back(data):
    tools = data.draw(st.sampled_from(JSON_FORMATS))
    calls = data.draw(st.lists(st.tuples(st.sampled_from(TOOLS), OBJECTS), min_size=1, max_size=3))
    assert read(write(tools, calls), tools) == [call(*one) for one in calls]


@pytest.mark.parametrize("repeated", [" ", "\n", "<tool_call>", '<tool_call>{"', '<tool_call>{"name": "', "x"])
def test_a_long_answer_costs_the_same_for_each_character(repeated):
    def seconds(count):
        one, text, begun = parser(HERMES, THINK), repeated * (count // len(repeated)), time.process_time()
        for start in range(0, len(text), 5):
            one.feed_text(text[start : start + 5])
        one.finish()
        return time.process_time() - begun

    assert seconds(80_000) < 30 * seconds(10_000)  # 8 times as much; 64 times if all were looked at again and again


# ── which format it is ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("template", "tools", "thinks"),
    [
        ("<tools>...</tools> within <tool_call></tool_call> tags", HERMES, None),
        ("<tool_call> ... {{ enable_thinking }} <think>\n\n</think>", HERMES, THINK),
        ("<tool_call>\n<function=example>", QWEN_TAGS, None),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>", GLM, None),
        ("{{ '<|python_tag|>' }}", LLAMA, None),
        ('Respond in the format {"name": function name, "parameters": dictionary}', LLAMA, None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [{", MISTRAL_LIST, None),
        ("[TOOL_CALLS]name[ARGS]{", MISTRAL_BY_NAME, None),
        ("<｜tool▁calls▁begin｜> function<｜tool▁sep｜>\n```json\n </think>", DEEPSEEK_FENCED, THINK),
        ("<｜tool▁calls▁begin｜> name<｜tool▁sep｜>", DEEPSEEK, None),
        ("<|channel|>analysis<|message|>x<|end|>", HARMONY, KINDS[3]),
        ("<|tool_call>call: <|channel>thought <channel|>", GEMMA, KINDS[2]),
        ("[TOOL_CALLS]name[ARGS]{ [THINK] ... [/THINK]", MISTRAL_BY_NAME, KINDS[1]),
    ],
)
def test_the_format_shows_in_the_chat_template(template, tools, thinks):
    found = format_of(template)
    assert (found.tools, found.thinks, found.shows_tools) == (tools, thinks, True)


def test_a_template_without_a_known_form_of_calls_gets_the_tools_described():
    for template, thinks in (("<|user|>x<|end|>", None), ("{% if '</think>' in content %}", THINK)):
        found = format_of(template)
        assert (found.tools, found.thinks, found.shows_tools) == (HERMES, thinks, False)


def test_an_answer_of_a_model_without_tools_and_reasoning_is_not_looked_at():
    assert isinstance(parser(HERMES, names=()), Plain)
    assert read(" <tool_call> \n", HERMES, names=()) == [Text(" <tool_call> \n")]


def test_reasoning_is_turned_on_and_off_where_the_template_knows_how():
    hybrid, always, never = format_of("</think>{% if enable_thinking %}"), format_of("</think>"), format_of("")
    graded = format_of("{{ reasoning_effort }}")
    for effort in ("on", "minimal", "high", "max"):
        assert hybrid.effort(effort) == {"enable_thinking": True}
    assert hybrid.effort("none") == {"enable_thinking": False}
    assert graded.effort("low") == {"reasoning_effort": "low"}
    assert (always.effort("on"), never.effort("none"), graded.effort("none")) == ({}, {}, {}), "as it is"
    assert (always.effort("none"), always.effort("low"), never.effort("on")) == (None, None, None), "without effect"


STRING = {"properties": {"s": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": STRING}},
        {"allOf": [{"required": ["s"]}, STRING]},
        {"anyOf": [STRING, {"properties": {"other": {"type": "integer"}}}]},
        {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [STRING]}}},
        {"patternProperties": {"^s": {"type": "string"}}},
        {"patternProperties": {"^s": {"type": "string"}}, "additionalProperties": False},
        {"additionalProperties": {"type": "string"}, "allOf": [{"additionalProperties": False}]},
    ],
)
def test_a_property_is_found_behind_references_and_alternatives(schema):
    assert types_of_property(schema, "s") == {"string"}


def test_a_property_has_the_types_of_all_alternatives():
    other = {"properties": {"s": {"type": ["integer", "null"]}}}
    assert types_of_property({"anyOf": [STRING, other]}, "s") == {"string", "integer", "null"}
    assert types_of_property({"allOf": [STRING, other]}, "s") == ALL_TYPES
    assert types_of_property({"anyOf": [STRING, {"additionalProperties": {}}]}, "s") == ALL_TYPES
    assert types_of_property({"anyOf": [STRING] * 300}, "s") == ALL_TYPES  # too many to search


@pytest.mark.parametrize("deep", [{"anyOf": [{"$ref": "#/$defs/j"}] * 20}, {"allOf": [{"$ref": "#/$defs/j"}] * 20}])
def test_types_of_a_schema_that_refers_to_itself_are_found_at_once(deep):
    assert types_of_property({"properties": {"s": {"$ref": "#/$defs/j"}}, "$defs": {"j": deep}}, "s") == ALL_TYPES


@pytest.mark.parametrize(
    "malformed", [{"enum": None}, {"allOf": None}, {"type": 5}, {"type": [{}]}, {"anyOf": 3}, {"$ref": 5}]
)
def test_malformed_keywords_of_a_schema_count_for_nothing(malformed):
    assert types_of_property({"properties": {"s": malformed}}, "s") == ALL_TYPES


def test_white_space_before_a_call_is_dropped():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(f"hi  {call} bye", HERMES) == [Text("hi"), ToolCall("f", "{}"), Text("bye")]
