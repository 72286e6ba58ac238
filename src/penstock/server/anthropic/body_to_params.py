"""Converts Anthropic's request bodies to conversations."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.api.tools import Function, Tools, add_names, arguments_text, called, template_id
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.parsers.history import is_billing, placeholder
from penstock.server.anthropic.schema import Block, ContextManagement, PromptBody, ToolChoice, ToolParam, Turn
from penstock.server.body import check_text
from penstock.server.image_parts import image_in_source, not_supported
from penstock.text.content import Content, ImageSource, content_of, joined, text_of

_OWNERS = {"thinking": "assistant", "redacted_thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
_UNREAD = frozenset({"redacted_thinking"})
"""Blocks dropped without a placeholder: another server's encrypted reasoning, which this model cannot read."""


def conversation(body: PromptBody, known: ChatFormat) -> Conversation:
    """Convert a body to a conversation. If the last turn is the assistant's, it is the beginning of the answer.

    Raises:
        InvalidRequestError: a block is not text or belongs to another role, or an option of tools, reasoning or
            context management is unsupported.
    """
    asked_from = 1 + max((i for i, turn in enumerate(body.messages) if turn.role == "assistant"), default=-1)
    system = _system(body.system or "", known)
    messages = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(body.messages):
        for message in _messages(turn, f"messages[{index}].content", known, is_history=index < asked_from):
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
    variables, ignored = _template_variables(body, known)
    tools, left_out = _tools(body.tools, body.tool_choice)
    return Conversation(messages, tools, variables, prefill, (*ignored, *left_out))


def _ignored_edits(given: ContextManagement | None) -> list[str]:
    """Names of edits without effect: the chat template decides which earlier reasoning is in the prompt."""
    edits = (given and given.edits) or []
    for index, edit in enumerate(edits):
        if not edit.type.startswith("clear_thinking"):
            field = f"context_management.edits[{index}].type"
            raise InvalidRequestError(
                f"{field}: {edit.type} is not supported here: leave it out, and shorten the conversation", field
            )
    return ["context_management"] if any(edit.keep != "all" for edit in edits) else []


def _messages(turn: Turn, field: str, known: ChatFormat, *, is_history: bool) -> list[dict[str, Any]]:
    """A turn's messages as chat templates expect them: tool results are separate messages."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": check_text(turn.content, field)}]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(turn.content):
        at = f"{field}[{index}]"
        if _OWNERS.get(block.type, turn.role) != turn.role:
            raise InvalidRequestError(f"{at}: a {turn.role} has no {block.type} block", at)
        if block.type == "tool_result":
            messages.append(_result(block, at, known))
            continue
        if not messages or messages[-1]["role"] == "tool":
            messages.append({"role": turn.role, "content": ""})
        _add(messages[-1], block, at, known, with_placeholder=is_history or turn.role != "user")
    return messages or [{"role": turn.role, "content": ""}]


def _add(message: dict[str, Any], block: Block, field: str, known: ChatFormat, *, with_placeholder: bool) -> None:
    if block.type == "thinking":
        thought = check_text(block.thinking or "", field)
        if thought:
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
    elif block.type == "tool_use":
        input = {} if block.input is None else block.input
        arguments = check_text(arguments_text(input, field), field)
        made = called(check_text(block.name, field), arguments, check_text(block.id, field))
        message.setdefault("tool_calls", []).append(made)
    else:
        takes_image = known.takes_images and block.type == "image" and message["role"] == "user"
        content = (
            content_of([image_in_source(block.source, field)], "")
            if takes_image
            else _block_text(block, field, known, with_placeholder=with_placeholder)
        )
        message["content"] = joined(message["content"], content, "")


def _block_text(block: Block, field: str, known: ChatFormat, *, with_placeholder: bool) -> str:
    """The text of a block.

    Args:
        with_placeholder: a block that is not text becomes a placeholder; otherwise it is refused.

    Raises:
        InvalidRequestError: it is not text, or is not valid Unicode.
    """
    if block.type == "text":
        if block.text is None:
            raise InvalidRequestError(f"{field}.text: this parameter is required", f"{field}.text")
        return check_text(block.text, field)
    if block.type == "document" and isinstance(block.source, dict) and block.source.get("type") == "text":
        return check_text("\n\n".join(filter(None, (block.title, str(block.source.get("data", ""))))), field)
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        return "\n".join(filter(None, (block.title, source, text_of(_content(block.content, field, known)))))
    if block.type == "tool_reference":
        return check_text(f"[tool: {block.tool_name}]", field)
    if block.type in _UNREAD:
        return ""
    if not with_placeholder:
        raise not_supported(block.type, field, known)
    return check_text(placeholder(block.type), field)


def _result(block: Block, field: str, known: ChatFormat) -> dict[str, Any]:
    content = _content(block.content, f"{field}.content", known)
    id = template_id(check_text(block.tool_use_id, field))
    return {
        "role": "tool",
        "content": joined("Error: ", content, "") if block.is_error else content,
        "tool_call_id": id,
    }


def _content(content: Any, field: str, known: ChatFormat) -> Content:
    """The content of a result: of its blocks, or its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(content, field)
    if isinstance(content, list) and all(isinstance(block, Block) for block in content):
        return content_of([_result_part(block, f"{field}[{i}]", known) for i, block in enumerate(content)], "")
    return check_text(json.dumps(content, ensure_ascii=False), field)


def _result_part(block: Block, field: str, known: ChatFormat) -> str | ImageSource:
    if known.takes_images and block.type == "image":
        return image_in_source(block.source, field)
    return _block_text(block, field, known, with_placeholder=True)


def _join(last: dict[str, Any], message: dict[str, Any]) -> None:
    last["content"] = joined(last["content"], message.pop("content"), "\n\n")
    last |= message


def _tools(given: Sequence[ToolParam] | None, choice: ToolChoice | None) -> tuple[Tools, tuple[str, ...]]:
    """The caller's tools, and the field `tools` if some of them are Anthropic's own, which cannot run here."""
    own = [tool for tool in given or () if tool.type == "custom"]
    left_out = ("tools.type",) if len(own) < len(given or ()) else ()
    functions = tuple(
        Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict))
        for tool in own
    )
    if choice is None:
        return Tools(functions), left_out
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequestError("tool_choice.name is required for type tool, and only for it", "tool_choice.name")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return Tools.forced(functions, choice.name or ""), left_out
    return Tools(functions, "required" if choice.type == "any" else choice.type, parallel=parallel), left_out


def _template_variables(body: PromptBody, known: ChatFormat) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables, and the fields that set none of them."""
    efforts: list[tuple[str, str]] = []
    if body.output_config is not None and body.output_config.effort is not None:
        efforts.append(("output_config.effort", body.output_config.effort))
    if body.thinking is not None and body.thinking.type != "adaptive":
        efforts.append(("thinking", "none" if body.thinking.type == "disabled" else "on"))
    variables: dict[str, Any] = {}
    ignored = _ignored_edits(body.context_management)
    for field, effort in efforts:
        wanted = known.effort(effort)
        if wanted is None:
            ignored.append(field)
        else:
            variables |= wanted  # thinking comes last: Claude Code sends an effort beside thinking that is disabled
    return variables, tuple(ignored)


def _system(system: str | Sequence[Block], known: ChatFormat) -> str:
    if isinstance(system, str):
        return check_text(system, "system")
    return "".join(
        _block_text(block, f"system[{index}]", known, with_placeholder=False)
        for index, block in enumerate(system)
        if not (block.text and is_billing(block.text))
    )
