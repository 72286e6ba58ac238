"""From the bodies of OpenAI's Responses to the words of chat templates."""

from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import ChatFormat, Conversation
from penstock.parsers.tools import Function, Tools, add_names, called, template_id
from penstock.sampling_params import SamplingParams
from penstock.server.body import check_text
from penstock.server.openai.body_to_params import allowed
from penstock.server.openai.responses_schema import (
    LOGPROBS,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ReasoningText,
    ResponsesBody,
    TextItem,
    ToolChoiceObject,
)
from penstock.server.response_format import structured_of_text_format


def response_params(body: ResponsesBody, known: ChatFormat) -> SamplingParams:
    """
    Raises:
        InvalidRequestError: parameters contradict each other, or one is out of range.
    """
    wanted = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wanted:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    if wanted and (body.tools or known.thinks):
        raise InvalidRequestError(f"{LOGPROBS!r} in include goes with answers that are nothing but text", "include")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        logprobs=body.top_logprobs or 0 if wanted else None,
        structured=structured_of_text_format(body.text.format) if body.text and body.text.format else None,
    )


def conversation(body: ResponsesBody, known: ChatFormat) -> Conversation:
    """The conversation of a body: its items, tools and text format.

    Raises:
        InvalidRequestError: an item is no text, or what is said of tools or reasoning is not obeyed.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": check_text(body.instructions, "instructions")})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": check_text(body.input, "input")})
    else:
        for index, item in enumerate(body.input):
            _add(messages, item, f"input[{index}]")
    add_names(messages)
    effort = None if body.reasoning is None else body.reasoning.effort
    return Conversation(messages, _tools(body), {} if effort is None else known.effort(effort) or {})


def _add(messages: list[dict[str, Any]], item: Item, field: str) -> None:
    """An item as templates know it. What an assistant thought, said and called in one turn is one message."""
    if isinstance(item, FunctionCallOutputItem):
        text, id = _text(item.output, f"{field}.output"), template_id(check_text(item.call_id, f"{field}.call_id"))
        messages.append({"role": "tool", "content": text, "tool_call_id": id})
        return
    role = item.role if isinstance(item, MessageItem) else "assistant"
    if not (messages and role == "assistant" and _is_one_turn(messages[-1], item)):
        messages.append({"role": "system" if role == "developer" else role, "content": ""})
    if isinstance(item, MessageItem):
        messages[-1]["content"] = _text(item.content, f"{field}.content")
    elif isinstance(item, ReasoningItem):
        messages[-1]["reasoning_content"] = _text(item.content or "", f"{field}.content")
    else:
        for said in (item.name, item.arguments, item.call_id):
            check_text(said, field)
        messages[-1].setdefault("tool_calls", []).append(called(item.name, item.arguments, item.call_id))


def _is_one_turn(last: dict[str, Any], item: Item) -> bool:
    """Whether an assistant's item continues the message before it: the order is reasoning, text, calls."""
    if last["role"] != "assistant" or isinstance(item, ReasoningItem):
        return False
    return isinstance(item, FunctionCallItem) or (not last["content"] and "tool_calls" not in last)


def _tools(body: ResponsesBody) -> Tools:
    functions = tuple(
        Function(name=one.name, description=one.description, parameters=one.parameters, strict=bool(one.strict))
        for one in body.tools or ()
    )
    choice = body.tool_choice
    if not isinstance(choice, ToolChoiceObject):
        return Tools(functions, choice or "auto", parallel=body.parallel_tool_calls is not False)
    if choice.type == "function" and choice.name is not None and choice.tools is None and choice.mode is None:
        return Tools.forced(functions, choice.name)
    if choice.type == "allowed_tools" and choice.name is None and choice.tools is not None and choice.mode is not None:
        return allowed(functions, [tool.name for tool in choice.tools], choice.mode, body.parallel_tool_calls)
    words = "tool_choice needs a name for type function, and mode and tools for allowed_tools"
    raise InvalidRequestError(words, "tool_choice")


def _text(content: str | Sequence[TextItem | ReasoningText], field: str) -> str:
    return check_text(content if isinstance(content, str) else "".join(piece.text for piece in content), field)
