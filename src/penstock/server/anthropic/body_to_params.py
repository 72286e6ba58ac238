"""From Anthropic's bodies to the words of chat templates."""

from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.parsers.tools import Function, Tools, add_names, arguments_text, called, template_id
from penstock.server.anthropic.schema import (
    Block,
    PromptBody,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolChoice,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from penstock.server.body import check_text, renamed_params

_WHOSE = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


def conversation(body: PromptBody, known: ChatFormat) -> Conversation:
    """The conversation of a body. A last turn of the assistant begins the answer.

    Raises:
        InvalidRequestError: a turn is no text or not its role's, or what is said of tools or reasoning is not obeyed.
    """
    messages = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    for index, turn in enumerate(body.messages):
        for message in _messages(turn, f"messages[{index}].content"):
            last = messages[-1] if messages else {}
            if last.get("role") == message["role"] != "tool" and "tool_calls" not in last:
                _join(last, message)
            else:
                messages.append(message)
    add_names(messages)
    prefill = ""
    if messages[-1]["role"] == "assistant":
        if messages[-1].keys() != {"role", "content"}:
            raise InvalidRequestError(
                "the last assistant message ends with a call or thinking; only text can be continued", "messages"
            )
        prefill = messages.pop()["content"]
    if not any(message["role"] != "system" for message in messages):
        raise InvalidRequestError("there is no user message before the assistant's: add one", "messages")
    return Conversation(messages, _tools(body.tools, body.tool_choice), _variables(body.thinking, known), prefill)


def _messages(turn: Turn, field: str) -> list[dict[str, Any]]:
    """A turn as templates know it: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": check_text(turn.content, field)}]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(turn.content):
        if _WHOSE.get(block.type, turn.role) != turn.role:
            raise InvalidRequestError(f"{field}[{index}]: a {turn.role} has no {block.type} block", f"{field}[{index}]")
        if isinstance(block, ToolResultBlock):
            messages.append(_result(block, field))
            continue
        if not messages or messages[-1]["role"] == "tool":
            messages.append({"role": turn.role, "content": ""})
        _add(messages[-1], block, field)
    return messages or [{"role": turn.role, "content": ""}]


def _add(message: dict[str, Any], block: Block, field: str) -> None:
    if isinstance(block, TextBlock):
        message["content"] += check_text(block.text, field)
    elif isinstance(block, ThinkingBlock):
        message["reasoning_content"] = message.get("reasoning_content", "") + check_text(block.thinking, field)
    elif isinstance(block, ToolUseBlock):
        arguments = check_text(arguments_text(block.input, field), field)
        made = called(check_text(block.name, field), arguments, check_text(block.id, field))
        message.setdefault("tool_calls", []).append(made)


def _result(block: ToolResultBlock, field: str) -> dict[str, Any]:
    text = _text(block.content or "", field)
    id = template_id(check_text(block.tool_use_id, field))
    return {"role": "tool", "content": f"Error: {text}" if block.is_error else text, "tool_call_id": id}


def _join(last: dict[str, Any], message: dict[str, Any]) -> None:
    last["content"] = "\n\n".join(text for text in (last["content"], message.pop("content")) if text)
    last |= message


def _tools(given: Sequence[ToolParam] | None, choice: ToolChoice | None) -> Tools:
    functions = tuple(
        Function(name=one.name, description=one.description, parameters=one.input_schema, strict=bool(one.strict))
        for one in given or ()
    )
    if choice is None:
        return Tools(functions)
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequestError("tool_choice.name is required for type tool, and only for it", "tool_choice.name")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return Tools.forced(functions, choice.name or "")
    return Tools(functions, "required" if choice.type == "any" else choice.type, parallel=parallel)


def _variables(thinking: Thinking | None, known: ChatFormat) -> dict[str, Any]:
    if thinking is None:
        return {}
    with renamed_params({"reasoning_effort": "thinking"}):
        return known.think(thinking.type != "disabled")


def _text(content: str | Sequence[TextBlock], field: str) -> str:
    return check_text(content if isinstance(content, str) else "".join(block.text for block in content), field)
