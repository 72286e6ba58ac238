"""Response formats in every spelling, and the form that each asks for."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.server.response_format import (
    FormatBody,
    SchemaFormat,
    TextFormat,
    TgiGrammar,
    structured_of_text_format,
)

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
OBEYED = Structured.json_schema(SCHEMA)


def form_of(response_format: Any) -> Structured | None:
    return FormatBody.model_validate({"response_format": response_format}).structured()


def text_form_of(given: Any) -> Structured | None:
    return structured_of_text_format(TypeAdapter(TextFormat).validate_python(given))


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Structured.json_object()),
        ({"type": "json_object", "schema": SCHEMA}, OBEYED),
        ({"type": "json_object", "schema": {}}, Structured.json_object()),
        ({"type": "json_schema", "schema": SCHEMA}, OBEYED),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, OBEYED),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, Structured.json_schema({})),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, Structured.json_object()),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": None, "description": None, "strict": None, "schema": SCHEMA},
            },
            OBEYED,
        ),
        ({"type": "json_object", "json_schema": None, "schema": None, "value": None}, Structured.json_object()),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "$defs": {}, "title": "T"}, "id": 5}, OBEYED),
        ({"type": "json", "value": SCHEMA}, OBEYED),
        ({"type": "json_object", "value": SCHEMA}, OBEYED),
        ({"type": "regex", "value": "a+"}, Structured.regex("a+")),
        (None, None),
    ],
)
def test_a_response_format_asks_for_a_form(given: Any, form: Structured | None) -> None:
    assert form_of(given) == form


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "json_schema"}, "takes `json_schema` or `schema` or `value`; it has nothing else"),
        ({"type": "json_schema", "json_schema": None}, "it has nothing else"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "it has `json_schema`"),
        ({"type": "json_schema", "json_schema": {}, "schema": SCHEMA}, "has `json_schema` and `schema`"),
        ({"type": "text", "schema": SCHEMA}, "takes nothing else; it has `schema`"),
        ({"type": "json_object", "grammar": "root"}, "it has `grammar`"),
        ({"type": "regex"}, "takes `value`"),
    ],
)
def test_a_response_format_that_contradicts_itself_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        form_of(given)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"type": "text", "schema": None}, None),
        ({"type": "json_object"}, Structured.json_object()),
        ({"type": "json_object", "schema": SCHEMA, "name": None}, OBEYED),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": None, "other": 1}, OBEYED),
        ({"type": "json_schema", "schema": {}}, Structured.json_schema({})),
    ],
)
def test_a_text_format_of_responses_asks_for_a_form(given: Any, form: Structured | None) -> None:
    assert text_form_of(given) == form


@pytest.mark.parametrize("given", [{"type": "text", "schema": SCHEMA}, {"type": "json_schema", "schema": None}])
def test_a_text_format_that_contradicts_itself_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"text\.format\.schema"):
        text_form_of(given)


def test_unknown_fields_of_other_dialects_formats_are_ignored() -> None:
    assert TypeAdapter(SchemaFormat).validate_python({"type": "json_schema", "schema": SCHEMA, "name": "x"})
    assert TypeAdapter(TgiGrammar).validate_python({"type": "json", "value": SCHEMA, "name": "x"})
    body = FormatBody.model_validate({"structured_outputs": {"json": SCHEMA, "disable_fallback": True, "regex": None}})
    assert body.structured() == OBEYED
