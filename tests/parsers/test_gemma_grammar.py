"""Calls of Gemma 4 that a schema permits: by hand, and random ones, which are read back and validated."""

import pytest

from penstock.api.sampling_params import Structured
from penstock.api.tools import Function, Tools
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import GEMMA, ChatFormat
from penstock.parsers.parts import Reasoning, Text, ToolCall, put_together
from penstock.parsers.reasoning import KINDS
from tests.parsers.answers import enforced, permits, random_parameters, random_text, vocabulary
from tests.parsers.test_formats import write
from tests.structured.answers import follows
from tests.support.schemas import check_document

THOUGHT = KINDS[2]
OTHER = Function("g", strict=True)
SHAPES = {
    "text": ({"type": "string"}, ["", 'a "b"\n{}[],:', "<|", "日本"], [1, None, []]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\n🙂"], ["a", "abcd", ""]),
    "words": ({"type": "string", "enum": ["km", "kmh", "", "日本", 1]}, ["km", "kmh", "", "日本"], ["k", "x", 1]),
    "constants": (
        {"enum": [1, True, None, "x", [1, {"a": "b"}], {}]},
        [1, True, None, "x", [1, {"a": "b"}], {}],
        [2, False, [1], [1, {"a": "c"}]],
    ),
    "one constant": ({"const": "x"}, ["x"], ["y", None]),
    "whole": ({"type": "integer", "minimum": -3, "exclusiveMaximum": 10}, [-3, 9], [-4, 10, 1.5, "1"]),
    "number": ({"type": "number", "maximum": 1}, [0.5, 1, -10], [2, True]),
    "steps": ({"type": "integer", "multipleOf": 5}, [0, 15], [4]),
    "flag": ({"type": "boolean"}, [True, False], [None, "true", 1]),
    "nothing": ({"type": "null"}, [None], [False, "null"]),
    "several types": ({"type": ["string", "integer", "null"], "minLength": 1}, ["a", 1, None], ["", 0.5, []]),
    "any": ({}, ["", 1, None, [[]], {"a": {"b": [True]}}], []),
    "true": (True, ["x", {"a": 1}], []),
    "either": ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]}, [1, [None]], [[1], "x"]),
    "one of": ({"oneOf": [{"type": "number"}, {"type": "string"}], "title": "X"}, [1.5, "x"], [None, []]),
    "list": ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["x"], 1]),
    "short list": ({"type": "array", "minItems": 1, "maxItems": 3, "items": {}}, [[1], [1, "b", {}]], [[], [1] * 4]),
    "pairs at least": ({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    "no items": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "b-c.d": 2}],
        [{"a": "x"}, []],
    ),
    "closed": ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    "object": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b b": {"type": "string"}, "ü": {}, "d": {"type": "null"}},
            "required": ["b b"],
        },
        [{"b b": ""}, {"a": 1, "b b": "x"}, {"b b": "x", "ü": [1], "d": None}, {"a": 1, "b b": "", "d": None}],
        [{}, {"a": 1}, {"a": 1, "ü": 1}, {"b b": "x", "other": 1}, {"a": "x", "b b": "x"}],
    ),
    "optional": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}},
        [{}, {"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "c": 2}, {"b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}],
        [{"d": 1}],
    ),
    "typed union": (
        {"type": "object", "anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}]},
        [{"a": None}],
        [{}, {"a": 1}],
    ),
    "reference": ({"$ref": "#/$defs/node"}, [{"v": 1}, {"v": 1, "next": {"v": 2, "next": None}}], [{"next": None}, 1]),
}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v"],
}


def strict(schema):
    return Function("f", None, {"properties": {"x": schema}, "required": ["x"], "$defs": {"node": NODE}}, strict=True)


def read(text, *functions, thinks=None):
    parser = ChatFormat(GEMMA, thinks, frozenset()).parser(functions, "")
    return put_together([*parser.feed_text(text), *parser.finish()])


@pytest.mark.parametrize("schema", SHAPES)
def test_values_validate(schema):
    shape, good, bad = SHAPES[schema]
    forced = enforced(GEMMA, Tools((strict(shape),), "required"))
    for value in good:
        assert permits(forced, write(GEMMA, [("f", {"x": value})])), value
    for value in bad:
        assert permits(forced, write(GEMMA, [("f", {"x": value})])) is False, value


@pytest.mark.parametrize("schema", SHAPES)
def test_random_calls_are_read_back_and_validate(schema):
    function = strict(SHAPES[schema][0])
    for choice in ("required", "auto"):
        form = enforced(GEMMA, Tools((function, OTHER), choice))
        for text in filter(None, (random_text(form, seed) for seed in range(8))):
            for part in read(text, function, OTHER):
                assert isinstance(part, ToolCall) or choice == "auto"
                if isinstance(part, ToolCall):
                    check_document(part.arguments, {"f": function, "g": OTHER}[part.name].schema)


def test_random_schemas_are_obeyed_or_refused_by_a_keyword():
    obeyed = 0
    for seed in range(60):
        function = Function("f", None, random_parameters(seed), strict=True)
        try:
            form = enforced(GEMMA, Tools((function,), "required"))
        except InvalidRequestError:
            continue
        if (text := random_text(form, seed)) is not None:
            obeyed += 1
            for part in read(text, function):
                check_document(part.arguments, function.schema)
    assert obeyed > 10


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "x"}, "pattern"),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "string", "minLength": 10**6}, "minLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
        ({"type": "string", "enum": [1]}, "enum"),
        ({"type": "string", "enum": "a"}, "enum"),
        ({"enum": ['<|"|>']}, "<|"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "prefixItems": []}, "prefixItems"),
        ({"type": "array", "minItems": "1"}, "minItems"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"type": "object", "required": "a"}, "required"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "object", "properties": {"a:b": {}}}, "a:b"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"anyOf": []}, "anyOf"),
        ({"anyOf": [{"type": "string"}], "minLength": 1}, "minLength"),
        ({"not": {}}, "not"),
        ({"allOf": [{}]}, "allOf"),
        ({"$ref": "#/$defs/missing"}, "ref"),
        ({"$ref": "#/$defs/node", "type": "string"}, "type"),
        ({"type": "integer", "minimum": "1"}, "minimum"),
        ({"type": "word"}, "type"),
        (False, "false"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_or_any_object_if_not_strict(schema, keyword):
    function = strict(schema)
    with pytest.raises(InvalidRequestError, match=keyword) as refused:
        enforced(GEMMA, Tools((function,), "required"))
    assert refused.value.param == "tools"
    lax = Function("f", None, function.parameters)
    for tools in (Tools((lax,), "required"), Tools((lax,), parallel=False)):
        assert permits(enforced(GEMMA, tools), '<|tool_call>call:f{a:[1,{b:<|"|>c<|"|>}]}<tool_call|>')
        assert permits(enforced(GEMMA, tools), "<|tool_call>call:f[]<tool_call|>") is False


def test_a_schema_that_is_nested_too_deeply_is_refused():
    schema = {"type": "string"}
    for _ in range(900):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        enforced(GEMMA, Tools((strict(schema),), "required"))


def test_the_grammar_of_a_nested_schema_is_no_larger_than_the_schema_makes_it():
    def size(depth):
        schema = {"type": "string", "minLength": 1}
        for _ in range(depth):
            schema = {
                "type": "array",
                "items": {"type": "object", "properties": {"a": schema, "b": {"enum": ["x" * 40]}}},
            }
        return len(enforced(GEMMA, Tools((strict(schema),), "required")).text)

    assert size(20) - size(10) < 1.1 * (size(10) - size(0)) + 100


def test_a_string_ends_where_its_mark_is_spelled_out():
    tokenizer, known = vocabulary()
    form = enforced(GEMMA, Tools((strict({"type": "string"}),), "required"))
    begun = tokenizer.encode('<|tool_call>call:f{x:<|"|>a', add_special_tokens=False)
    spelled = [tokenizer.encode(character, add_special_tokens=False)[0] for character in '<|"|>']
    assert follows(known, form, begun + spelled[:-1]) is None
    assert follows(known, form, begun + spelled) is False, "the parser cannot tell it from the mark"


def test_calls_follow_reasoning_that_bears_its_label():
    form = enforced(GEMMA, Tools((strict({}),), "required"), thinks=THOUGHT)
    call = "<|tool_call>call:f{x:1}<tool_call|>"
    assert permits(form, call)
    text = f"<|channel>thought\nHm {{x:1}}.\n<channel|>{call}{call}"
    assert permits(form, text)
    assert read(text, strict({}), thinks=THOUGHT) == [Reasoning("Hm {x:1}."), *[ToolCall("f", '{"x": 1}')] * 2]
    assert permits(form, f"<|channel>other\n<channel|>{call}") is False
    assert permits(form, f"So {call}") is False


def test_beside_a_form_an_answer_is_calls_or_the_form():
    form = enforced(GEMMA, Tools((strict({}),)), Structured.json_object(), thinks=THOUGHT)
    call = "<|tool_call>call:f{x:1}<tool_call|>"
    for answer in ('{"x": {"y": 1}}', call, call * 2):
        assert permits(form, answer)
        assert permits(form, f"<|channel>thought\n{{<channel|>{answer}")
    for answer in ('{"x": 1, "x": 2}', "x", f"{{}}{call}", f"{call}{{}}"):
        assert permits(form, answer) is False
    once = enforced(GEMMA, Tools((strict({}),), parallel=False), Structured.json_object())
    assert permits(once, call * 2) is False


def test_text_around_calls_is_free():
    form = enforced(GEMMA, Tools((strict({}),)))
    call = "<|tool_call>call:f{x:1}<tool_call|>"
    for text in ("", "Hello {x:", f"So {call} and {call}", f"{call} {{", call):
        assert permits(form, text)
    assert permits(form, "So <|tool_call>call:f{}") is False
    assert permits(form, "So <|tool_call>call:other{}") is False
    assert read(f"So {call}", strict({})) == [Text("So"), ToolCall("f", '{"x": 1}')]
