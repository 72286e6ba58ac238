"""What grammars let a model write, asked of the library that enforces them."""

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits, LLTokenizer

from penstock.api.sampling_params import MAX_FORM_CHARACTERS, RoundedNumber, SamplingParams, Structured
from penstock.api.tools import (
    MAX_TOOLS,
    NO_TOOLS,
    Function,
    Tools,
    add_names,
    arguments_text,
    call_id,
    called,
    template_id,
)
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import (
    FORMATS,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL_BY_NAME,
    QWEN_TAGS,
    ChatFormat,
    constrain,
)
from penstock.parsers.parts import put_together
from penstock.parsers.reasoning import KINDS
from penstock.parsers.tagged import TypesOfProperties
from penstock.structured.vocabulary import Pieces
from tests.parsers.test_formats import TAGGED, call, write
from tests.structured.answers import follows

CITY = Function(
    "city",
    "Finds one.",
    {"properties": {"name": {"$ref": "#/$defs/name"}}, "required": ["name"], "$defs": {"name": {"type": "string"}}},
)
STRICT = Function("count", None, {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, True)
NOTHING = Function("nothing")
NOTES = Function(
    "note",
    None,
    {
        "properties": {
            "notes": {"type": "object", "additionalProperties": {"type": "integer"}},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        },
        "additionalProperties": False,
    },
    True,
)
PARIS, FIVE = ("city", {"name": "Paris"}), ("count", {"n": 5})
BYTES = LLTokenizer("byte")
BYTE_PIECES = Pieces([bytes([byte]) for byte in range(256)] + [b""] * 6)

ONE_CALL = (LLAMA, HARMONY)
"""Formats with one call at most in an answer."""
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
json_formats = pytest.mark.parametrize(
    "format",
    [tools_format for tools_format in FORMATS if tools_format not in (*TAGGED, GEMMA)],
    ids=lambda one: one.name,
)
formats_of_json = pytest.mark.parametrize(
    "format", [tools_format for tools_format in FORMATS if tools_format is not GEMMA], ids=lambda one: one.name
)


def calls_of(format, *calls):
    """Calls as a grammar lets a model write them."""
    return write(format, calls).removeprefix("<|python_tag|>").removesuffix("<|call|>")


def text_of(format, text, *calls):
    """Text, and calls after it."""
    header, between = ("<|channel|>final<|message|>", "<|end|><|start|>assistant") if format is HARMONY else ("", "")
    return header + text + (between + calls_of(format, *calls) if calls else "")


def told(text, form, known=None, prompt_end=""):
    """Whether a text is a complete answer by a grammar; None if it could become one."""
    before = known.reasoning_rule(prompt_end, json.dumps) if known else ""
    documents = known.documents((), True, prompt_end, json.dumps) if known else form.documents
    return told_as_it_is(text, replace(form, before=before, documents=documents))


def told_as_it_is(text, whole):
    """Likewise, with all that a form has about it already."""
    return follows(SimpleNamespace(library=BYTES, pieces=BYTE_PIECES, size=261), whole, BYTES.tokenize_str(text))


def chat(tools, thinks=None):
    return ChatFormat(tools, thinks, frozenset())


def grammar(format, *functions, **said):
    return called_by(format, Tools(functions, **said))


def called_by(format, tools):
    known = chat(format)
    return replace(
        Structured.grammar(known.grammar(tools, json.dumps)),
        documents=known.documents(tools.callable, False, "", json.dumps),
    )


@formats
def test_a_forced_answer_is_calls_with_arguments_that_validate(format):
    forced = grammar(format, CITY, STRICT, NOTHING, choice="required")
    opening = "" if format is LLAMA else "<|python_tag|>"
    for made in (PARIS, FIVE, ("nothing", {})):
        assert told(calls_of(format, made), forced)
    if format not in TAGGED:  # there, 5 is the string "5"
        assert told(calls_of(format, ("city", {"name": 5})), forced) is False
    for made in (("city", {}), ("count", {"n": 0.5}), ("nothing", {"a": 1}), ("other", {})):
        assert told(calls_of(format, made), forced) is False
    assert told("Hello", forced) is False
    assert told("", forced) is None
    assert told(opening, forced) is (None if format is LLAMA else False)


@formats
def test_several_calls_only_where_the_format_and_the_caller_allow_them(format):
    several = calls_of(format, PARIS, FIVE)
    assert told(several, grammar(format, CITY, STRICT, choice="required")) is (format not in ONE_CALL)
    assert told(several, grammar(format, CITY, STRICT, choice="required", parallel=False)) is False
    if format is not LLAMA:
        assert told(several, grammar(format, CITY, parallel=False)) is False


@formats
def test_not_forced_an_answer_is_text_until_it_begins_a_call(format):
    free = grammar(format, CITY, STRICT)
    assert told(text_of(format, "What a fine day {it} is.\n"), free)
    assert told(text_of(format, ""), free)
    assert told(calls_of(format, FIVE), free)
    assert told(calls_of(format, ("count", {"n": "many"})), free) is False
    assert told(calls_of(format, ("city", {"any": []})), free), "this one is not strict"
    if format is not LLAMA:
        assert told(text_of(format, "Wait: ", FIVE), free)
        assert told(text_of(format, "Wait: ", ("count", {"n": "many"})), free) is False
        assert told(text_of(format, "Wait: ", ("other", {})), free) is False


@formats
def test_a_named_function_is_the_only_one_and_called_once(format):
    named = called_by(format, Tools.forced((CITY, STRICT), "count"))
    assert told(calls_of(format, FIVE), named)
    for calls in ([PARIS], [FIVE, FIVE]):
        assert told(calls_of(format, *calls), named) is False


@formats
def test_what_a_grammar_lets_through_the_parser_reads(format):
    text = calls_of(format, PARIS)
    assert told(text, grammar(format, CITY, choice="required"))
    parser = chat(format).parser([CITY], "")
    assert put_together([*parser.feed_text(text), *parser.finish()]) == [call(*PARIS)]


@pytest.mark.parametrize(
    "form", [Structured.json_object(), Structured.regex(r"\{.*\}"), Structured.grammar('start: "{}"')]
)
def test_reasoning_may_stand_before_any_form(form):
    known = chat(HERMES, KINDS[0])
    assert told("{}", form, known)
    assert told('<think>\n{"a"?\n</think>\n\n{}', form, known)
    assert told("so\n</think>\n\n{}", form, known, prompt_end="<think>\n")
    assert told("{}", form, known, prompt_end="<think>\n") is None, "it is still reasoning"
    assert told("<think>a</think>no", form, known) is False


def test_a_mark_that_is_a_special_token_is_written_by_its_id():
    written = chat(MISTRAL_BY_NAME).grammar(Tools((STRICT,)), lambda mark: f"<[{len(mark)}]>")
    assert "opening: TEXT <[12]>\n" in written
    assert 'call_0: "count" <[6]> arguments_0\n' in written
    rule = ChatFormat(HERMES, KINDS[1], frozenset()).reasoning_rule("", lambda mark: f"<[{len(mark)}]>")
    assert rule == "before: (<[7]> thinking /\\n{0,2}/)?\nthinking: /(?s:.*)/ <[8]>"


def test_only_calls_that_must_be_valid_are_enforced():
    assert not Tools((CITY,)).enforced
    assert not Tools((STRICT,), "none").enforced
    for said in ({"choice": "required"}, {"parallel": False}, {"names": ("city",)}):
        assert Tools((CITY,), **said).enforced
    assert Tools((CITY, STRICT)).enforced


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Function("two words"), "tools"),
        (lambda: Function("x" * 129), "tools"),
        (lambda: Function("f", None, {"type": "string"}), "tools"),
        (lambda: Function("f", "\ud800"), "tools"),
        (lambda: Tools((CITY, CITY)), "tools"),
        (lambda: Tools(tuple(Function(f"f{i}") for i in range(MAX_TOOLS + 1))), "tools"),
        (lambda: Tools((), "required"), "tool_choice"),
        (lambda: Tools.forced((CITY,), "count"), "tool_choice"),
    ],
)
def test_tools_that_cannot_be_are_refused(make, param):
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.param == param


@formats_of_json
def test_arguments_have_no_key_twice(format):
    forced = grammar(format, NOTES, choice="required")
    once, twice = ({"notes": {"a": 1, "b": 2}, "tags": ["x", "y"]}, '{"notes": {"a": 1, "a": 2}}')
    written = calls_of(format, ("note", once))
    assert told(written, forced)
    assert told(written.replace('"b"', '"a"'), forced) is False
    assert told(written.replace('"y"', '"x"'), forced) is False
    free = grammar(format, NOTES, parallel=False)
    assert told(text_of(format, f"A text with {twice}"), free), "it is no call"
    assert told(text_of(format, twice), free) or format is LLAMA, "nor is this"


NO_SPECIAL_TOKENS = SimpleNamespace(special_token=lambda mark: None, decode=lambda tokens, **_: "")
PERSON = {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}


def test_special_tokens_that_the_caller_shows_stay_shown_beside_the_marks_of_calls():
    tokenizer = SimpleNamespace(special_token=lambda mark: 9, decode=lambda tokens, **_: "")
    params = SamplingParams(shown_special_tokens=[7])
    assert set(constrain(params, chat(HERMES), tokenizer, [], Tools((CITY,))).shown_special_tokens) == {7, 9}
    assert constrain(params, chat(HERMES), tokenizer, [], NO_TOOLS) is params


def beside(format, form, *functions, thinks=None, **said):
    """The form of answers that are calls or of another form."""
    params = constrain(
        SamplingParams(structured=form), chat(format, thinks), NO_SPECIAL_TOKENS, [], Tools(functions, **said)
    )
    return params.structured


@formats
@pytest.mark.parametrize("closed", [False, True])
def test_beside_a_form_an_answer_is_calls_or_of_the_form(format, closed):
    form = Structured.json_schema(PERSON | {"type": "object", "additionalProperties": not closed})
    either = beside(format, form, CITY, STRICT)
    assert told(text_of(format, '{"name": "Ann", "age": 3}'), either)
    assert told(text_of(format, '{"name": "count", "age": 3}'), either), "it begins as some calls do"
    assert told(text_of(format, '{"name": "Ann"}'), either) is False
    assert told(text_of(format, "Hello"), either) is False
    written = calls_of(format, FIVE)
    assert told(written, either)
    assert told(calls_of(format, ("city", {"any": []})), either), "this one is not strict"
    if format is not LLAMA:
        assert told(calls_of(format, ("count", {"n": "many"})), either) is False
        assert told(text_of(format, "Wait: ", FIVE), either) is False
        assert told(calls_of(format, FIVE, PARIS), either) is (format not in ONE_CALL)
        assert told(calls_of(format, FIVE, PARIS), beside(format, form, CITY, STRICT, parallel=False)) is False
        assert told(written + '{"name": "Ann", "age": 3}', either) is False


@formats_of_json
def test_keys_and_items_are_there_once_in_calls_and_in_the_form_beside_them(format):
    lists = {
        "type": "object",
        "properties": {"l": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    }
    either = beside(format, Structured.json_schema(lists), NOTES)
    assert told(text_of(format, '{"l": [1, 2], "m": [1, 1]}'), either)
    assert told(text_of(format, '{"l": [1, 1]}'), either) is False
    assert told(text_of(format, '{"m": 1, "m": 2}'), either) is False
    once = {"notes": {"a": 1, "b": 2}, "tags": ["x", "y"]}
    written = calls_of(format, ("note", once))
    assert told(written, either)
    if format is not LLAMA:  # where the same text may be of the form
        assert told(written.replace('"y"', '"x"'), either) is False
    assert told(written.replace('"b"', '"a"'), either) is False


def test_a_form_follows_the_header_of_harmonys_final_message():
    final = "<|channel|>final<|message|>"
    form = beside(HARMONY, Structured.json_object(), thinks=KINDS[3])
    thought = "<|channel|>analysis<|message|>{a?<|end|><|start|>assistant"
    assert told_as_it_is(final + '{"a": 1}', form)
    assert told_as_it_is(thought + final + '{"a": 1}', form)
    assert told_as_it_is('{"a": 1}', form) is False
    assert told_as_it_is(final + '{"a": 1, "a": 2}', form) is False


def test_calls_beside_a_form_may_follow_reasoning():
    either = beside(HERMES, Structured.json_object(), STRICT, thinks=KINDS[0])
    written = write(HERMES, [FIVE])
    for answer in ("{}", written):
        assert told_as_it_is(answer, either)
        assert told_as_it_is(f"<think>\n{{a?\n</think>\n\n{answer}", either)


def test_beside_calls_with_a_mark_any_form_may_stand_and_without_one_only_json():
    for form in (Structured.regex("[a-c]+"), Structured.choice(["a", "b"]), Structured.grammar('start: "ab" | "b"')):
        either = beside(HERMES, form, STRICT)
        assert told_as_it_is("b", either)
        assert told_as_it_is(write(HERMES, [FIVE]), either)
        assert told_as_it_is("{}", either) is False
        with pytest.raises(InvalidRequestError, match="without a tag") as refused:
            beside(LLAMA, form, STRICT)
        assert refused.value.param == "tools"


def test_ids_have_nine_letters_and_digits_and_are_the_same_when_told_again():
    ids = {call_id(request, index, place) for request in ("a", "b") for index in (0, 1) for place in (0, 1)}
    assert len(ids) == 8
    assert all(len(id) == 9 and id.isalnum() and template_id(id) == id for id in ids)
    assert template_id("call_abc") == template_id("call_abc") != template_id("call_abd")


def test_templates_are_given_arguments_as_objects_and_results_with_names():
    made = called("f", '{"a": [1]}', "123456789")
    assert made == {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    assert called("f", "", "1")["function"]["arguments"] == {}
    assert called("f", "null", "1")["function"]["arguments"] == {}
    for broken in ("{broken", "[1]", '"x"'):
        assert called("f", broken, "1")["function"]["arguments"] == {"INVALID_JSON": broken}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "x", "tool_call_id": "123456789"},
        {"role": "tool", "content": "y", "tool_call_id": "123456789", "name": "g"},
        {"role": "tool", "content": "z"},
    ]
    add_names(messages)
    assert [message.get("name") for message in messages] == [None, "f", "g", None]


WORDS = Function(
    "words",
    None,
    {
        "properties": {
            "unit": {"enum": ["km", "mile"]},
            "code": {"type": "string", "minLength": 2, "maxLength": 3},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
        },
        "required": ["unit"],
    },
    True,
)


@pytest.mark.parametrize("format", TAGGED, ids=lambda one: one.name)
def test_strings_between_tags_obey_words_and_lengths(format):
    forced = grammar(format, WORDS, choice="required")
    good = ({"unit": "km"}, {"unit": "mile", "code": "a\n"}, {"unit": "km", "maybe": "null", "any": [1]})
    for arguments in good:
        assert told(write(format, [("words", arguments)]), forced), arguments
    for arguments in ({}, {"unit": "m"}, {"unit": "km", "code": "a"}, {"unit": "km", "code": "abcd"}):
        assert told(write(format, [("words", arguments)]), forced) is False, arguments


@pytest.mark.parametrize("format", TAGGED, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 1}}}, "minimum"),
        ({"properties": {"a": {"description": "x", "not": {"const": 1}}}}, "not"),
        ({"properties": {"a": {"not": {}}}, "required": ["a"]}, "required"),
        ({"properties": {"a": {"not": 1}}}, "not"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}}}, "format"),
        ({"properties": {"a": {"type": "string", "minLength": 10**6}}}, "minLength"),
        ({"minProperties": 1}, "minProperties"),
        ({"required": ["a"]}, "required"),
    ],
)
def test_what_cannot_be_enforced_between_tags_is_refused_by_name(format, schema, keyword):
    with pytest.raises(InvalidRequestError, match=keyword) as refused:
        grammar(format, Function("f", None, schema, strict=True))
    assert refused.value.param == "tools"
    assert grammar(format, Function("f", None, schema), STRICT), "it need not validate here"
    forced = grammar(format, Function("f", None, schema), STRICT, choice="required")
    assert told(write(format, [("f", {"a": "what?"})]), forced), "it cannot validate"
    assert told(write(format, [("count", {"n": "many"})]), forced) is False


def test_every_grammar_lets_a_call_through():
    assert all(told(calls_of(tools_format, PARIS), grammar(tools_format, CITY)) for tools_format in FORMATS)


def test_arguments_that_are_nested_too_deeply_stay_text_or_are_refused():
    deep = "[" * 5000 + "]" * 5000
    assert called("f", deep, "id")["function"]["arguments"] == {"INVALID_JSON": deep}
    nested: dict[str, object] = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        arguments_text(nested, "messages[0].tool_calls")
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        Function("f", parameters={"type": "object", "default": nested})


@pytest.mark.parametrize(
    ("change", "keyword"),
    [
        ({"required": "n"}, "required"),
        ({"properties": [1]}, "properties"),
        ({"properties": {"n": {"type": "string", "enum": "a"}}}, "enum"),
        ({"properties": {"n": {"type": "string", "minLength": "3"}}}, "minLength"),
    ],
)
@pytest.mark.parametrize("tags", TAGGED, ids=[one.name for one in TAGGED])
def test_a_malformed_schema_of_arguments_is_refused_by_its_keyword(tags, change, keyword):
    function = replace(STRICT, parameters={**STRICT.parameters, **change})
    with pytest.raises(InvalidRequestError, match=keyword):
        tags.grammar.arguments(function, 0, True, json.dumps)


ROUNDED = RoundedNumber(0.1)
ROUNDED.literal = "0.10000000000000000001"
ODD = {
    "nowhere": ({"$ref": "#/nowhere"}, 1),
    "look-around": ({"type": "string", "pattern": "a(?=b)"}, "c"),
    "not": ({"not": {"type": "string"}}, "a"),
    "uniqueItems": ({"type": "array", "items": {"type": "object"}, "uniqueItems": True}, [{}, {}]),
    "if, then": ({"type": "number", "if": {}, "then": {}}, 1),
    "0000001": ({"const": ROUNDED}, 0.2),
    "no double": ({"const": 2**60 + 1}, 5),
    "Unsatisfiable": ({"type": "integer", "minimum": 5, "maximum": 3}, 4),
    "is unsatisfiable": ({"not": {}}, 1),
    "must be one": ({"type": "text"}, "a"),
    "a schema": (5, "a"),
}
"""Schemas of a property that cannot be enforced, by words of their refusal, each with some value of its type."""
odd_schemas = pytest.mark.parametrize("words", ODD)


def odd_tool(words, strict=False):
    return Function("odd.1", None, {"properties": {"x": ODD[words][0]}, "required": ["x"]}, strict)


@odd_schemas
@json_formats
def test_a_schema_that_cannot_be_enforced_leaves_its_tool_free_and_no_other(format, words):
    forced = grammar(format, STRICT, odd_tool(words), CITY, choice="required")
    for made in (PARIS, FIVE, ("odd.1", {"x": ODD[words][1]}), ("odd.1", {"y": {}})):
        assert told(calls_of(format, made), forced), made
    for made in (("count", {"n": "many"}), ("city", {}), ("odd.1", "no object")):
        assert told(calls_of(format, made), forced) is False, made
    assert told(text_of(format, "Hi"), grammar(format, odd_tool(words), parallel=False)), (
        "where it need not validate, it is free"
    )


@odd_schemas
@json_formats
def test_a_strict_tool_whose_schema_cannot_be_enforced_is_refused(format, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        told("", grammar(format, STRICT, odd_tool(words, strict=True)))
    assert "odd.1" in str(refused.value) or "unsatisfiable" in str(refused.value).lower()


@odd_schemas
@pytest.mark.parametrize("format", TAGGED, ids=lambda one: one.name)
def test_between_tags_such_a_value_is_free_and_no_other(format, words):
    schema, value = ODD[words]
    function = Function("f", None, {"properties": {"x": schema, "n": {"type": "integer"}}, "required": ["n"]})
    forced = grammar(format, function, STRICT, choice="required")
    never = words == "is unsatisfiable"
    assert told(write(format, [("f", {"x": value, "n": 5})]), forced) is (not never)
    for made in (("f", {"x": value}), ("f", {"n": "a"}), ("count", {"n": "many"})):
        assert told(write(format, [made]), forced) is False, made
    strict = replace(function, strict=True)
    if not never:
        with pytest.raises(InvalidRequestError):
            told("", grammar(format, strict))


def test_where_the_whole_is_too_much_for_the_library_only_strict_tools_are_enforced(monkeypatch):
    """Each schema compiles alone."""
    wide = {"properties": {f"p{number}": {"type": "boolean"} for number in range(400)}}
    forced = grammar(HERMES, STRICT, *(Function(f"f{n}", None, wide) for n in range(5)), choice="required")
    good, bad = write(HERMES, [("f1", {"p0": True})]), write(HERMES, [("f1", {"p0": 0})])
    assert told(good, forced)
    assert told(bad, forced) is False
    monkeypatch.setattr("penstock.structured.grammar.LIMITS", LLParserLimits(max_grammar_size=12_000))
    assert told(good, forced)
    assert told(bad, forced)
    assert told(write(HERMES, [("count", {"n": "many"})]), forced) is False
    monkeypatch.setattr("penstock.structured.grammar.LIMITS", LLParserLimits(max_grammar_size=10))
    with pytest.raises(InvalidRequestError, match="grammar"):
        told(good, forced)


@formats
def test_of_as_many_tools_as_are_permitted_those_are_enforced_for_which_there_is_room(format):
    schema = {"properties": {"n": {"type": "integer", "description": "Some words. " * 200}}, "required": ["n"]}
    functions = [Function(f"f{number}".ljust(128, "_"), None, schema) for number in range(MAX_TOOLS - 1)]
    form = called_by(format, Tools((*functions, STRICT), "required"))
    first, last = functions[0].name, functions[-1].name
    for made in ((first, {"n": 5}), FIVE, (last, {} if format is GEMMA else {"other": 5})):
        assert told(calls_of(format, made), form), made
    for made in ((first, {}), ("count", {})):
        assert told(calls_of(format, made), form) is False, made


def test_a_tool_whose_schema_alone_is_too_large_leaves_room_for_others():
    large = Function("large", None, {"properties": {"n": {"const": "x" * MAX_FORM_CHARACTERS}}})
    forced = grammar(HERMES, large, replace(STRICT, strict=False), choice="required")
    assert told(write(HERMES, [("large", {"n": 1})]), forced)
    assert told(write(HERMES, [("count", {"n": "many"})]), forced) is False
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_FORM_CHARACTERS}"):
        told("", grammar(HERMES, replace(large, strict=True)))


keywords = st.sampled_from(
    [
        *(
            "type",
            "properties",
            "required",
            "items",
            "enum",
            "const",
            "pattern",
            "format",
            "minimum",
            "maxLength",
            "not",
        ),
        *("anyOf", "allOf", "oneOf", "$ref", "$defs", "additionalProperties", "propertyNames", "uniqueItems", "a", "b"),
        *("prefixItems", "multipleOf", "patternProperties", "minProperties", "default", "if"),
    ]
)
words = st.sampled_from(
    ["string", "integer", "object", "array", "#", "#/$defs/a", "date", "^a(?=b)", "^[ab]+$", "a", ""]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=int(os.environ.get("TEST_SWEEP", "60")))
@given(st.dictionaries(keywords, anything, max_size=4))
def test_a_tool_that_is_not_strict_may_have_any_schema(parameters):
    """Whatever its keywords are, calls can be required, and those of another tool validate."""
    function = Function("odd", None, {**parameters, "type": "object"})
    for format in FORMATS:
        forced = grammar(format, STRICT, function, choice="required")
        assert told(calls_of(format, FIVE), forced)
        assert told(calls_of(format, ("count", {"n": "a"})), forced) is False


HARMLESS = {
    "no keyword": ({}, {"type": "object"}),
    "required null": ({"type": "object", "required": None}, {"type": "object"}),
    "properties null": ({"properties": None}, {"type": "object"}),
    "type null": ({"type": None}, {"type": "object"}),
    "type a list": ({"type": ["object"]}, {"type": "object"}),
    "type a list with null": ({"type": ["object", "null"]}, {"type": "object"}),
    "a property null": ({"properties": {"a": None}}, {"type": "object", "properties": {"a": {}}}),
    "nulls in properties": (
        {"properties": {"a": {"type": "array", "items": {"enum": None}, "default": None, "title": None}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {}, "default": None}}},
    ),
    "nulls that are values": (
        {"properties": {"a": {"enum": [None, 1]}, "b": {"anyOf": [{"const": None}, {"type": "array", "title": None}]}}},
        {
            "type": "object",
            "properties": {"a": {"enum": [None, 1]}, "b": {"anyOf": [{"const": None}, {"type": "array"}]}},
        },
    ),
    "additionalProperties {}": ({"additionalProperties": {}}, {"type": "object", "additionalProperties": {}}),
    "$schema and $id": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.example/x"},
        {"type": "object", "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.example/x"},
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_odd_schemas_mean_what_their_authors_meant(case):
    given, schema = HARMLESS[case]
    function = Function("f", None, given)
    assert function.schema == schema
    seen = function.as_template_sees_it()["function"]["parameters"]
    assert {**seen, "type": "object"} == schema
    for format in FORMATS:
        for strict in (False, True):
            forced = grammar(format, replace(function, strict=strict), choice="required")
            assert told(calls_of(format, ("f", {})), forced)


def test_without_parameters_a_tool_takes_none_and_its_template_sees_none():
    assert NOTHING.schema["additionalProperties"] is False
    assert "parameters" not in NOTHING.as_template_sees_it()["function"]


def test_draft_7_and_alternatives_at_the_root_are_enforced():
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "anyOf": [{"properties": {"a": {"$ref": "#/definitions/X"}}, "required": ["a"]}, {"maxProperties": 0}],
        "definitions": {"X": {"type": "string"}},
    }
    forced = grammar(HERMES, Function("f", None, schema), choice="required")
    assert told(write(HERMES, [("f", {"a": "x"})]), forced)
    assert told(write(HERMES, [("f", {})]), forced)
    assert told(write(HERMES, [("f", {"a": 1})]), forced) is False


def test_properties_that_share_a_large_definition_are_read_in_linear_time():
    shared = {"x": {"anyOf": [{"const": number} for number in range(2_000)]}}
    properties = {f"p{number}": {"$ref": "#/$defs/x"} for number in range(2_000)}
    types = TypesOfProperties({"properties": properties, "$defs": shared})
    began = time.process_time()
    assert all(types.of(name) == {"integer", "number"} for name in properties)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("format", "text", "end"),
    [
        (
            QWEN_TAGS,
            "<tool_call>\n<function=city>\n<parameter=name>\n{}\n</parameter>\n</function>\n</tool_call>",
            "\n</parameter>",
        ),
        (GLM, "<tool_call>city\n<arg_key>name</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>", "</arg_value>"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_text_between_tags_ends_where_the_parser_ends_it(format, text, end, strict):
    for choice in ("auto", "required"):
        rules = grammar(format, replace(CITY, strict=strict), choice=choice, parallel=False)
        assert told(text.format("Paris"), rules)
        assert not told(text.format(f'{end}"x'), rules)
