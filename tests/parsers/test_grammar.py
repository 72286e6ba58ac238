"""What grammars let a model write, asked of the library that enforces them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from llguidance import LLTokenizer

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import FORMATS, GEMMA, HARMONY, HERMES, LLAMA, MISTRAL_BY_NAME, ChatFormat, constrain
from penstock.parsers.parts import put_together
from penstock.parsers.reasoning import KINDS
from penstock.parsers.tools import MAX_TOOLS, Function, Tools, add_names, arguments_text, call_id, called, template_id
from penstock.sampling_params import SamplingParams, Structured
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
formats_of_json = pytest.mark.parametrize(
    "format", [one for one in FORMATS if one is not GEMMA], ids=lambda one: one.name
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


def test_only_what_must_be_guarded_is():
    assert not Tools((CITY,)).guarded
    assert not Tools((STRICT,), "none").guarded
    for said in ({"choice": "required"}, {"parallel": False}, {"names": ("city",)}):
        assert Tools((CITY,), **said).guarded
    assert Tools((CITY, STRICT)).guarded


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
        with pytest.raises(InvalidRequestError, match="without a mark") as refused:
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
        ({"properties": {"a": {"description": "x", "not": {}}}}, "not"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}}}, "format"),
        ({"properties": {"a": {"type": "string", "minLength": 10**6}}}, "minLength"),
        ({"minProperties": 1}, "minProperties"),
        ({"required": ["a"]}, "required"),
    ],
)
def test_what_cannot_be_enforced_between_tags_is_refused_by_name(format, schema, keyword):
    with pytest.raises(InvalidRequestError, match=keyword) as refused:
        grammar(format, Function("f", None, schema), choice="required")
    assert refused.value.param == "tools"
    assert grammar(format, Function("f", None, schema), STRICT), "it need not validate here"


def test_every_grammar_lets_a_call_through():
    assert all(told(calls_of(one, PARIS), grammar(one, CITY)) for one in FORMATS)


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
        ({"required": None}, "required"),
        ({"required": "n"}, "required"),
        ({"properties": [1]}, "properties"),
        ({"properties": {"n": {"type": "string", "enum": None}}}, "enum"),
        ({"properties": {"n": {"type": "string", "minLength": "3"}}}, "minLength"),
    ],
)
@pytest.mark.parametrize("tags", TAGGED, ids=[one.name for one in TAGGED])
def test_a_malformed_schema_of_arguments_is_refused_by_its_keyword(tags, change, keyword):
    function = replace(STRICT, parameters={**STRICT.parameters, **change})
    with pytest.raises(InvalidRequestError, match=keyword):
        tags.grammar.arguments(function, 0, True, json.dumps)
