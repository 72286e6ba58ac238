"""The tools of OpenAI's Responses, as bodies write them."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from penstock.server.body import Body, HistoryItem, Many
from penstock.server.openai.tools_schema import WITHOUT_EFFECT

_TOOL_HINTS = WITHOUT_EFFECT | {"allowed_callers", "async", "output_schema"}


class FunctionTool(Body):
    """A function of the caller's."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = _TOOL_HINTS

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; default: no arguments.")
    strict: bool | None = Field(None, description="Arguments always validate, even if calls are not required.")


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool of the caller's with a text as input; offered to the model as a function with one string."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = _TOOL_HINTS

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = Field(None, description="A grammar is shown to the model, but not enforced.")


class LocalShellTool(Body):
    """A shell on the caller's machine; offered to the model as the function `local_shell`."""

    type: Literal["local_shell"]


class HostedTool(Body):
    """A tool of any other type, which runs on OpenAI's servers: left out of the prompt."""

    model_config = ConfigDict(extra="allow")

    type: str

    @classmethod
    def _check_others(cls, names: Iterable[str], data: Mapping[str, Any]) -> tuple[str, ...]:
        return ()


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return f"{kind} tool" if kind in ("function", "custom", "local_shell", "namespace") else "hosted tool"


class NamespaceTool(Body):
    """Several tools, whose names begin with the namespace in the prompt."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = _TOOL_HINTS

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Many[
        Annotated[
            Annotated[FunctionTool, Tag("function tool")]
            | Annotated[CustomTool, Tag("custom tool")]
            | Annotated[HostedTool, Tag("hosted tool")],
            Discriminator(lambda tool: _tool_tag(tool).replace("local_shell", "hosted").replace("namespace", "hosted")),
        ]
    ]


Tool = Annotated[
    Annotated[FunctionTool, Tag("function tool")]
    | Annotated[CustomTool, Tag("custom tool")]
    | Annotated[LocalShellTool, Tag("local_shell tool")]
    | Annotated[NamespaceTool, Tag("namespace tool")]
    | Annotated[HostedTool, Tag("hosted tool")],
    Discriminator(_tool_tag),
]


class ToolByName(HistoryItem):
    type: str = "function"
    name: str | None = None
    namespace: str | None = None


class ToolChoiceObject(Body):
    """One tool that must be called, or those that may."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Many[ToolByName] | None = None
