import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.api.sampling_params import MAX_FORM_CHARACTERS, Structured
from penstock.errors import InvalidRequestError
from penstock.structured.form_limits import MAX_CHOICES, MAX_PATTERN
from penstock.structured.grammar import compile_grammar
from tests.structured.answers import accepts


def keyword(**schema):
    return Structured.json_schema(schema)


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (keyword(uniqueItems=True, type="array"), "/uniqueItems: "),
        (
            keyword(properties={"a/b": {"not": {"const": 1}, "if": {}}}),
            "/properties/a~1b: these keywords are not supported: if, not",
        ),
        (keyword(**{"x-guidance": {"lenient": True}, "not": {"const": 1}}), "not supported: not"),
        (keyword(**{"not": {}, "type": "string"}), "Unsatisfiable"),
        (keyword(**{"not": 1}), "not supported: not"),
        (keyword(type="object", properties={"a": {"not": True}}, required=["a"]), "Unsatisfiable"),
        (keyword(propertyNames={"format": "email"}), '"propertyNames" may have only one'),
        (keyword(patternProperties={"^(?=a)b": True}), "look-ahead, which names cannot have"),
        (keyword(propertyNames={"not": {"const": "x"}}), "/propertyNames: these keywords are not supported: not"),
        (keyword(oneOf=[{"type": "integer"}, {"type": "number"}]), "oneOf"),
        (keyword(type="string", pattern="a(?=b)"), "look-around"),
        (keyword(type="integer", minimum=5, maximum=3), "Unsatisfiable"),
        (keyword(type="strng"), "strng"),
        (keyword(**{"$ref": "http://example.com/x"}), "example.com"),
        (Structured.json_schema(False), "Unsatisfiable"),
        (Structured.json_schema("[1"), "delimiter"),
        (Structured.json_schema("[]"), "object"),
        (Structured.json_schema("[" * 100_000), "nested too deeply"),
        (Structured.regex("(a"), "unclosed group"),
        (Structured.regex(r"(a)\1"), "backreferences"),
        (Structured.regex("a" * (MAX_PATTERN + 1)), f"at most {MAX_PATTERN}"),
        (Structured.grammar("first: second"), "start"),
        (Structured.grammar("start: <|nobody|>"), "special token"),
        (Structured.grammar("#" * (MAX_FORM_CHARACTERS + 1)), f"at most {MAX_FORM_CHARACTERS}"),
        (Structured.choice([str(i) for i in range(MAX_CHOICES + 1)]), f"at most {MAX_CHOICES}"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(vocabulary, structured, words):
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(vocabulary, structured)
    assert caught.value.param == "structured"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1, max_size=6).filter(lambda text: text.isprintable() or "\n" in text), min_size=1))
def test_a_choice_is_one_of_its_texts_whatever_they_hold(vocabulary, tokenizer, choices):
    structured = Structured.choice(choices)
    for text in choices:
        if tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text:
            assert accepts(vocabulary, tokenizer, structured, text)
    assert not accepts(vocabulary, tokenizer, structured, "".join(choices) + "!")


@pytest.mark.parametrize("before", ["", 'before: "!" /[a-z]*/ "!"'])
def test_as_many_choices_as_are_permitted_can_be_made(vocabulary, tokenizer, before):
    choices = [f"option {number}" for number in range(MAX_CHOICES)]
    structured = Structured("choice", choices=choices, before=before)
    thought = "!x!" if before else ""
    for text in (choices[0], choices[19], choices[199], choices[-1]):
        assert accepts(vocabulary, tokenizer, structured, thought + text)
    for text in ("option", f"option {MAX_CHOICES}", "option 19x"):
        assert not accepts(vocabulary, tokenizer, structured, thought + text)


def test_json_is_written_in_one_line_as_json_dumps_does(vocabulary, tokenizer):
    document = {"a": [1, 2.5, {"b": None}], "c": "d"}
    for structured in (
        Structured.json_object(),
        Structured.json_schema({"type": "object"}),
        Structured.json_schema(True),
    ):
        assert accepts(vocabulary, tokenizer, structured, json.dumps(document))
        assert not accepts(vocabulary, tokenizer, structured, json.dumps(document, indent=1))
        assert not accepts(vocabulary, tokenizer, structured, json.dumps(document, separators=(",", ":")))


def test_an_object_is_no_list(vocabulary, tokenizer):
    assert not accepts(vocabulary, tokenizer, Structured.json_object(), "[1]")
    assert accepts(vocabulary, tokenizer, Structured.json_schema(True), "[1]")


def test_a_regular_expression_is_matched_as_a_whole(vocabulary, tokenizer):
    assert accepts(vocabulary, tokenizer, Structured.regex("a+"), "aaa")
    assert not accepts(vocabulary, tokenizer, Structured.regex("a+"), "aab")


def test_a_choice_may_hold_any_control_character(vocabulary, tokenizer):
    assert accepts(vocabulary, tokenizer, Structured.choice(["a\x7fb", "c"]), "a\x7fb")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Structured.json_schema({"properties": {"a": {"const": "\ud800"}}}),
        lambda: Structured.json_schema('{"const": "\ud800"}'),
        lambda: Structured.regex("a\udfff"),
        lambda: Structured.grammar('start: "\ud800"'),
        lambda: Structured.choice(["fine", "\ud800"]),
        lambda: Structured.json_schema({"const": float("nan")}),
    ],
)
def test_what_is_no_text_is_refused_where_the_form_is_made(make):
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.param == "structured"
    assert str(caught.value).isprintable()


def test_half_a_surrogate_pair_that_is_escaped_is_refused_with_its_place(vocabulary):
    form = Structured.json_schema('{"properties": {"a": {"const": "\\ud800"}}}')
    with pytest.raises(InvalidRequestError, match=r"/properties/a/const: .*an unpaired surrogate"):
        compile_grammar(vocabulary, form)


def test_schemas_inside_of_grammars_are_held_to_the_same(vocabulary, tokenizer):
    closed = Structured.grammar('start: "x" %json {"type": "string", "format": "date"} // %json in a comment\n')
    assert accepts(vocabulary, tokenizer, closed, 'x"2024-02-29"')
    assert not accepts(vocabulary, tokenizer, closed, 'x"2023-02-29"')
    with pytest.raises(InvalidRequestError, match="no key or item comes twice"):
        compile_grammar(vocabulary, Structured.grammar('start: "x" %json {"type": "object"}'))


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.001}, ["0.001", "0.0001"], ["0", "0.0", "0.0000"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.25", "1.5"], ["1", "1.0"]),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, ["-0.75"], ["-1", "-1.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.001"], ["0", "-0", "-0.0"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.25"], ["-1", "-1.0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "1"]),
    ],
    ids=str,
)
def test_an_excluded_whole_number_is_never_written(vocabulary, tokenizer, bounds, good, bad):
    """Between bounds less than 1 apart the library would write it."""
    structured = Structured.json_schema({"type": "number", **bounds})
    assert [text for text in good if not accepts(vocabulary, tokenizer, structured, text)] == []
    assert [text for text in bad if accepts(vocabulary, tokenizer, structured, text)] == []
