"""Response-format fields of the dialects, converted to `Structured`."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import NotRequired, TypedDict

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.server.body import Body, Many

_OBJECT = ConfigDict(strict=True, extra="allow")
"""Objects in which unknown fields have no effect; `Body.ignored_fields` lists them. Null is a field left out."""


@with_config(_OBJECT)
class NamedSchema(TypedDict):
    """OpenAI's named schema. Always enforced, whatever `strict` says; name and description have no effect."""

    name: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


@with_config(_OBJECT)
class ResponseFormat(TypedDict):
    """OpenAI's, for chats; also with the `schema` of llama.cpp, Together and Fireworks, or with TGI's `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NotRequired[NamedSchema | None]
    schema: NotRequired[dict[str, Any] | None]
    value: NotRequired[Any]
    grammar: NotRequired[Any]


_DEFINED_BY = {
    "text": (None,),
    "json_object": (None, "schema", "value"),
    "json_schema": ("json_schema", "schema", "value"),
    "json": ("value",),
    "regex": ("value",),
}
"""The fields that may define a response format of each type; None: no field."""


def structured_of_response_format(given: ResponseFormat) -> Structured | None:
    """
    Raises:
        InvalidRequestError: there is no schema where there should be one, or the other way round.
    """
    kind = given["type"]
    fields = [name for name in ("json_schema", "schema", "value", "grammar") if given.get(name) is not None]
    field = fields[0] if fields else None
    if len(fields) > 1 or field not in _DEFINED_BY[kind]:
        expected = " or ".join("nothing else" if name is None else f"`{name}`" for name in _DEFINED_BY[kind])
        found = " and ".join(f"`{name}`" for name in fields) or "nothing else"
        raise InvalidRequestError(f"response_format of type {kind} takes {expected}; it has {found}", "response_format")
    if kind == "text":
        return None
    if field == "value":
        return structured_of_tgi_grammar({"type": kind, "value": given["value"]}, "response_format")
    named = given.get("json_schema")
    schema = given.get("schema") if named is None else named.get("schema")
    if schema is None or (kind == "json_object" and not schema):
        return Structured.json_object()
    return Structured.json_schema(schema)


@with_config(_OBJECT)
class StructuredOutputs(TypedDict):
    """vLLM's `structured_outputs`: exactly one field is set."""

    json: NotRequired[dict[str, Any] | str | None]
    regex: NotRequired[str | None]
    choice: NotRequired[Many[str] | None]
    grammar: NotRequired[str | None]
    json_object: NotRequired[bool | None]


def structured_of_vllm(given: StructuredOutputs) -> Structured:
    """
    Raises:
        InvalidRequestError: it is not exactly one.
    """
    known = StructuredOutputs.__annotations__
    said = [name for name, value in given.items() if name in known and value not in (None, False)]
    if len(said) != 1:
        raise InvalidRequestError(
            "structured_outputs takes one of json, regex, choice, grammar and json_object", "structured_outputs"
        )
    if (schema := given.get("json")) is not None:
        return Structured.json_schema(schema)
    if (pattern := given.get("regex")) is not None:
        return Structured.regex(pattern)
    if (choices := given.get("choice")) is not None:
        return Structured.choice(choices)
    if (grammar := given.get("grammar")) is not None:
        return Structured.grammar(grammar)
    return Structured.json_object()


class FormatBody(Body):
    """The response format's fields in bodies of chats and completions."""

    response_format: ResponseFormat | None = Field(
        None,
        description="`json_schema`: JSON that validates against the schema; `json_object`: any JSON object, or "
        "one that validates against a `schema` beside it. Also TGI's `json`, `json_object` and `json_schema` with a "
        "schema as `value`, and `regex` with a pattern.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="vLLM's: a JSON schema, a regular expression, a list of choices, or a grammar in Lark's notation.",
    )

    def structured(self) -> Structured | None:
        """
        Raises:
            InvalidRequestError: both fields define a format, or one of them is incomplete.
        """
        structured = None if self.response_format is None else structured_of_response_format(self.response_format)
        if self.structured_outputs is None:
            return structured
        if structured is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both define a format: leave one of them out",
                "structured_outputs",
            )
        return structured_of_vllm(self.structured_outputs)

    @property
    def structured_field(self) -> str:
        """The body field that sets the format, for error messages."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"


@with_config(_OBJECT)
class SchemaFormat(TypedDict):
    """Anthropic's."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


@with_config(_OBJECT)
class TextFormat(TypedDict):
    """OpenAI's, for Responses; a `json_schema` has the rest."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


def structured_of_text_format(given: TextFormat) -> Structured | None:
    """
    Raises:
        InvalidRequestError: there is no schema where there should be one, or the other way round.
    """
    kind, schema = given["type"], given.get("schema")
    if kind == "text" and schema is None:
        return None
    if kind == "text" or (kind == "json_schema" and schema is None):
        raise InvalidRequestError(
            "text.format.schema is required for type json_schema, and goes with json_object, but not with text", "text"
        )
    if schema is None or (kind == "json_object" and not schema):
        return Structured.json_object()
    return Structured.json_schema(schema)


@with_config(_OBJECT)
class TgiGrammar(TypedDict):
    """TGI's: `json`, `json_object` and `json_schema` take a schema, `regex` an expression."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any


def structured_of_tgi_grammar(given: TgiGrammar, field: str = "grammar") -> Structured:
    """
    Args:
        field: its name in error messages.

    Raises:
        InvalidRequestError: the value is not of its type.
    """
    kind, value = given["type"], given["value"]
    if kind == "json_schema" and isinstance(value, dict) and "schema" in value:  # {name, schema}, as newer ones have it
        value = value["schema"]
    if isinstance(value, dict) and "properties" in value:
        value = {"type": "object", **value}  # as TGI takes it
    if kind == "regex" and isinstance(value, str) and value:
        return Structured.regex(value)
    if kind != "regex" and isinstance(value, (dict, str)) and value != "":
        return Structured.json_schema(value)
    expected = "a regular expression" if kind == "regex" else "a JSON schema"
    raise InvalidRequestError(f"`{field}` of type {kind} needs {expected} as its value", field)
