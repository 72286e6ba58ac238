"""Tools as OpenAI's chat completions write them, in bodies and in answers."""

from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from penstock.server.body import Body, HistoryItem, IgnoredValues, Many

# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


WITHOUT_EFFECT = frozenset({"cache_control", "defer_loading", "eager_input_streaming", "input_examples", "title"})
"""Hints in tools: about caching, about when to show and how to stream them."""


class FunctionDefinition(Body):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; default: no arguments.")
    strict: bool | None = Field(None, description="Arguments always validate, even if calls are not required.")


class ToolDefinition(Body):
    """A function of the caller's."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"custom": ()}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class ToolName(Body):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Many[ToolName]


class ToolChoice(Body):
    """One function that must be called, or those that may; or a word, as an object."""

    UNSUPPORTED: ClassVar[IgnoredValues] = {"custom": ()}

    type: Literal["function", "allowed_tools", "auto", "none", "required", "any"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(HistoryItem):
    """A function's name and arguments, in a call of an earlier turn."""

    name: str = ""
    arguments: Any = Field(None, description="JSON, as text or as an object.")


class CustomCall(HistoryItem):
    """A custom tool's name and input, in a call of an earlier turn."""

    name: str = ""
    input: str = ""


class ToolCallMade(HistoryItem):
    """A call of an earlier turn."""

    id: str = ""
    function: CalledFunction | None = None
    custom: CustomCall | None = None


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
