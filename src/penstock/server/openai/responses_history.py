"""Converts the items of a conversation in OpenAI's Responses to messages for chat templates.

The reasoning, text and calls of an assistant's turn are several items, but one message.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api.tools import arguments_text, called, template_id
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat
from penstock.parsers.history import REASONING, placeholder
from penstock.server.body import check_text
from penstock.server.image_parts import image_at_url, not_supported, sound_in
from penstock.server.openai.responses_items_schema import (
    AdditionalToolsItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    OtherItem,
    Part,
    ReasoningItem,
    ResultItem,
    ShellCallItem,
)
from penstock.server.openai.responses_tools import SHELL, joined_name, shell_arguments
from penstock.text.content import Content, ImageSource, content_of, text_of

_IMAGES = ("input_image", "computer_screenshot")
_NOT_TEXT = ("image_url", "file_data", "file_id", "file_url", "input_audio")
_ARGUMENTS = ("arguments", "input", "action", "operation")
_RESULTS = ("output", "result", "outputs")
_NAME_OF_UNKNOWN_TOOL = "tool"


def messages_of(items: Sequence[Item], num_earlier: int, known: ChatFormat) -> list[dict[str, Any]]:
    """
    Args:
        num_earlier: number of leading items that come from stored responses; the others are the body's `input`.

    Raises:
        InvalidRequestError: the model cannot read the input after the assistant's last item.
    """
    asked_from = 1 + max((index for index, item in enumerate(items) if _is_assistants(item)), default=-1)
    turns = _Turns(known)
    for index, item in enumerate(items):
        turns.add(item, f"input[{index - num_earlier}]", is_history=index < max(asked_from, num_earlier))
    return turns.messages


def _is_assistants(item: Item) -> bool:
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    if isinstance(item, OtherItem):
        return not _is_result(item)
    return not isinstance(item, ResultItem | AdditionalToolsItem)


def _is_result(item: OtherItem) -> bool:
    return str(item.type).endswith("_output")


class _Turns:
    """Builds messages item by item."""

    def __init__(self, known: ChatFormat) -> None:
        self._known = known
        self.messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()

    def add(self, item: Item, field: str, *, is_history: bool) -> None:
        if isinstance(item, MessageItem):
            self._add_message(item, field, is_history=is_history)
        elif isinstance(item, ReasoningItem):
            thought = self._content(item.content or item.summary or "", field, "assistant", with_placeholders=True)
            self._add_reasoning(text_of(thought))
        elif isinstance(item, FunctionCallItem):
            self._add_call(joined_name(item.name, item.namespace), item.arguments, item.call_id or item.id, field)
        elif isinstance(item, CustomCallItem):
            name, input = joined_name(item.name, item.namespace), item.input or ""
            self._add_call(name, {"input": input}, item.call_id or item.id, field)
        elif isinstance(item, ShellCallItem):
            self._add_call(SHELL, shell_arguments(item.action), item.call_id or item.id, field)
        elif isinstance(item, ResultItem):
            self._add_result(item.output, item.call_id or item.id, item.name, field)
        elif isinstance(item, OtherItem):
            self._add_other(item, field)
        else:
            assert isinstance(item, AdditionalToolsItem), "references are replaced by their items"

    def _add_message(self, item: MessageItem, field: str, *, is_history: bool) -> None:
        if item.content is None and item.role != "assistant":
            raise InvalidRequestError(f"{field}.content: this parameter is required", f"{field}.content")
        text = self._content(item.content or "", f"{field}.content", item.role, with_placeholders=is_history)
        if item.role != "assistant":
            self.messages.append({"role": "system" if item.role == "developer" else item.role, "content": text})
        elif (last := self._assistants_last()) is not None and not last["content"]:
            last["content"] = text
        else:
            self.messages.append({"role": "assistant", "content": text})

    def _add_reasoning(self, thought: str) -> None:
        """Add reasoning; encrypted reasoning has no text and is dropped."""
        if not thought:
            return
        last = self._assistants_last()
        if last is not None and last.keys() == {"role", "content", REASONING} and not last["content"]:
            last[REASONING] += f"\n\n{thought}"
        else:
            self.messages.append({"role": "assistant", "content": "", REASONING: thought})

    def _add_call(self, name: str, arguments: Any, id: str | None, field: str) -> None:
        text = arguments if isinstance(arguments, str) else arguments_text(arguments, field)
        made = called(check_text(name, field), check_text(text, field), check_text(id or "", field))
        self._call_ids.add(made["id"])
        self._assistants_turn().setdefault("tool_calls", []).append(made)

    def _add_result(self, output: Any, id: str | None, name: str | None, field: str) -> None:
        """Add a tool result; if its call is missing, one is inserted, as templates require a call before it."""
        id = template_id(check_text(id or "", field))
        if id not in self._call_ids:
            self._add_call(name or _NAME_OF_UNKNOWN_TOOL, None, id, field)
        content = self._result(output, f"{field}.output")
        self.messages.append({"role": "tool", "content": content, "tool_call_id": id})

    def _add_other(self, item: OtherItem, field: str) -> None:
        kind, given = str(item.type), item.model_extra or {}
        id, name = given.get("call_id"), given.get("name")
        name = name if isinstance(name, str) else None
        if _is_result(item):
            id = id if isinstance(id, str) else given.get("id")
            self._add_result(_first(given, _RESULTS), id if isinstance(id, str) else None, name, field)
        elif kind.endswith("_call") and isinstance(id, str):
            self._add_call(name or kind.removesuffix("_call"), _first(given, _ARGUMENTS), id, field)
        else:
            turn, text = self._assistants_turn(), check_text(placeholder(kind), field)
            turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text

    def _content(self, content: str | Sequence[Part], field: str, role: str, *, with_placeholders: bool) -> Content:
        """A message's content.

        Args:
            with_placeholders: a part that the model cannot read becomes a placeholder, so that a conversation goes on;
                otherwise it is refused.
        """
        if isinstance(content, str):
            return check_text(content, field)
        made: list[str | ImageSource] = []
        for index, part in enumerate(content):
            at = f"{field}[{index}]"
            if self._known.takes_images and role == "user" and part.type == "input_image" and part.image_url:
                made.append(image_at_url(part.image_url, part.detail, at))
                continue
            if self._known.takes_sounds and role == "user" and part.type == "input_audio":
                made.append(sound_in(part.input_audio, at))
                continue
            text = part.text if part.text is not None else part.refusal
            if text is None and not with_placeholders:
                by_id = self._known.takes_images and part.type == "input_image"
                raise not_supported("file_id" if by_id else part.type, at, self._known)
            made.append(check_text(placeholder(part.type) if text is None else text, field))
        return content_of(made, "")

    def _result(self, output: Any, field: str) -> Content:
        """The content of a result: of its parts if it has some, otherwise its JSON."""
        if output is None or isinstance(output, str):
            return check_text(output or "", field)
        parts = output if isinstance(output, list) else [output]
        if all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts):
            return content_of([self._result_part(part, f"{field}[{i}]") for i, part in enumerate(parts)], "")
        return check_text(arguments_text(output, field), field)

    def _result_part(self, part: dict[str, Any], field: str) -> str | ImageSource:
        if isinstance(part.get("text"), str):
            return check_text(part["text"], field)
        if self._known.takes_images and part.get("image_url") and part["type"] in _IMAGES:
            return image_at_url(part["image_url"], part.get("detail"), field)
        text = placeholder(part["type"]) if part.keys() & set(_NOT_TEXT) else arguments_text(part, field)
        return check_text(text, field)

    def _assistants_last(self) -> dict[str, Any] | None:
        """The last message if it is the assistant's, otherwise None."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else None

    def _assistants_turn(self) -> dict[str, Any]:
        last = self._assistants_last()
        if last is None:
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def _first(given: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of these fields that an item has; if it has none of them, all of its fields, if any."""
    others = {name: value for name, value in given.items() if name not in ("id", "call_id", "name")}
    return next((given[name] for name in names if name in given), others or None)
