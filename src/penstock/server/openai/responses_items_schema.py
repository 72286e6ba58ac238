"""The items of a conversation in OpenAI's Responses, read leniently: they may come from any server or client."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from penstock.server.body import HistoryItem, Many
from penstock.server.openai.responses_tools_schema import Tool


class Part(HistoryItem):
    """A part of a message, of reasoning or of a result: text, and images or sounds if the model takes them."""

    type: str = "input_text"
    text: str | None = None
    image_url: Any = Field(None, description="A data URL.")
    detail: Any = None
    input_audio: Any = Field(None, description="A sound: an object with `data`, in base64, and `format`.")
    refusal: str | None = None


class MessageItem(HistoryItem):
    """A message; also one of an answer, as this server, another one or a client returned it."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[Part] | None = Field(None, description="Text parts are concatenated.")


class ReasoningItem(HistoryItem):
    """The assistant's reasoning, passed to the chat template: its content, or else its summary."""

    type: Literal["reasoning"]
    id: str | None = None
    content: str | Many[Part] | None = None
    summary: str | Many[Part] | None = None


class CallItem(HistoryItem):
    """Fields of every call that the assistant made, and of every result."""

    id: str | None = None
    call_id: str | None = None


class FunctionCallItem(CallItem):
    """A call of a function."""

    type: Literal["function_call"]
    name: str = ""
    namespace: str | None = None
    arguments: Any = Field(None, description="JSON, as text or as an object.")


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    name: str = ""
    namespace: str | None = None
    input: Any = None


class ShellCallItem(CallItem):
    """A call of the tool `local_shell`."""

    type: Literal["local_shell_call"]
    action: Any = None


class ResultItem(CallItem):
    """The result of a call: a text, text parts, or any JSON."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    name: str | None = None
    output: Any = None


class ItemReference(HistoryItem):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class AdditionalToolsItem(HistoryItem):
    """More tools, which Codex sends in place of the body's."""

    type: Literal["additional_tools"]
    id: str | None = None
    tools: Many[Tool] = Field(default_factory=list)


class OtherItem(HistoryItem):
    """An item of any other type. One that is named `..._call` or `..._output` is read as a call or as a result."""

    model_config = ConfigDict(extra="allow")

    type: Any = None


def _item_tag(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", "message")
    if kind is None:
        kind = "item_reference" if "id" in item and "role" not in item else "message"
    return f"{kind} item" if kind in _ITEM_TYPES else "other item"


_ITEM_TYPES = (
    *("message", "reasoning", "function_call", "custom_tool_call", "local_shell_call", "item_reference"),
    *("function_call_output", "custom_tool_call_output", "local_shell_call_output", "additional_tools"),
)
Item = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[ReasoningItem, Tag("reasoning item")]
    | Annotated[FunctionCallItem, Tag("function_call item")]
    | Annotated[CustomCallItem, Tag("custom_tool_call item")]
    | Annotated[ShellCallItem, Tag("local_shell_call item")]
    | Annotated[ResultItem, Tag("function_call_output item")]
    | Annotated[ResultItem, Tag("custom_tool_call_output item")]
    | Annotated[ResultItem, Tag("local_shell_call_output item")]
    | Annotated[ItemReference, Tag("item_reference item")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools item")]
    | Annotated[OtherItem, Tag("other item")],
    Discriminator(_item_tag),
]
"""The tags contain a space, so that errors can omit them from the field's path."""
