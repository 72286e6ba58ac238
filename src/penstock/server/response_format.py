"""Response-format fields of the dialects, converted to `Structured`."""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import NotRequired, TypedDict

from penstock.errors import InvalidRequestError
from penstock.sampling_params import Structured
from penstock.server.body import Body, Many, Neutral

_STRICT = ConfigDict(strict=True, extra="forbid")


@with_config(_STRICT)
class NamedSchema(TypedDict):
    """OpenAI's named schema. Always enforced, whatever `strict` says; name and description have no effect."""

    name: NotRequired[str]
    schema: NotRequired[dict[str, Any] | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


class ResponseFormat(Body):
    """OpenAI's, for chats; with a `value` TGI's, which huggingface_hub makes of OpenAI's `json_schema`."""

    NOT_OBEYED: ClassVar[Neutral] = {"grammar": ()}

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = None
    value: Any = None

    def structured(self) -> Structured | None:
        """
        Raises:
            InvalidRequestError: there is no schema where there should be one, or the other way round.
        """
        if self.value is not None or self.type in ("json", "regex"):
            return self._structured_of_value()
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format.json_schema is required for type json_schema, and only for it", "response_format"
            )
        if self.json_schema is not None:
            schema = self.json_schema.get("schema")
            return Structured.json_object() if schema is None else Structured.json_schema(schema)
        return Structured.json_object() if self.type == "json_object" else None

    def _structured_of_value(self) -> Structured:
        if self.type == "text" or self.json_schema is not None:
            raise InvalidRequestError(
                "response_format.value goes with the types json, json_object, json_schema and regex, and without "
                "json_schema",
                "response_format",
            )
        return structured_of_tgi_grammar({"type": self.type, "value": self.value}, "response_format")


@with_config(_STRICT)
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
    said = {name: value for name, value in given.items() if value not in (None, False)}
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
        description="`json_schema`: JSON that validates against the schema; `json_object`: any JSON object. Also TGI's "
        "`json`, `json_object` and `json_schema` with a schema as `value`, and `regex` with a pattern.",
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
        structured = None if self.response_format is None else self.response_format.structured()
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


@with_config(_STRICT)
class SchemaFormat(TypedDict):
    """Anthropic's."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


@with_config(_STRICT)
class TextFormat(TypedDict):
    """OpenAI's, for Responses; a `json_schema` has the rest."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    schema: NotRequired[dict[str, Any]]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


def structured_of_text_format(given: TextFormat) -> Structured | None:
    """
    Raises:
        InvalidRequestError: there is no schema where there should be one, or the other way round.
    """
    if (given["type"] == "json_schema") is not ("schema" in given):
        raise InvalidRequestError("text.format.schema is required for type json_schema, and only for it", "text")
    if "schema" in given:
        return Structured.json_schema(given["schema"])
    return Structured.json_object() if given["type"] == "json_object" else None


@with_config(_STRICT)
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
