"""Tools as OpenAI's chat completions write them, in bodies and in answers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from penstock.server.body import Body, Many, Neutral

# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


CacheControl = Annotated[
    dict[str, Any] | None,
    Field(
        description="OpenRouter's hint about what to cache. Accepted without effect: prefixes are cached by their "
        "tokens."
    ),
]
"""Anthropic's field, which OpenRouter, LiteLLM and aider put into OpenAI's bodies."""


OtherFields = Annotated[
    dict[str, Any] | None,
    Field(description="LiteLLM's notes of what else an earlier answer had. Taken and not used."),
]


class FunctionDefinition(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; default: no arguments.")
    strict: bool | None = Field(None, description="Arguments always validate, even if calls are not required.")
    cache_control: CacheControl = None


class ToolDefinition(Body):
    """A function of the caller's."""

    NOT_OBEYED: ClassVar[Neutral] = {"custom": ()}

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl = None


class FunctionName(Body):
    name: str


class ToolName(Body):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Many[ToolName]


class ToolChoice(Body):
    """One function that must be called, or those that may."""

    NOT_OBEYED: ClassVar[Neutral] = {"custom": ()}

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = Field(description="JSON, as text or as an object.")


class ToolCallMade(Body):
    """A call of an earlier turn."""

    NOT_OBEYED: ClassVar[Neutral] = {"custom": ()}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Accepted without effect.")
    cache_control: CacheControl = None
    provider_specific_fields: OtherFields = None


# ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────────


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta
