"""Tools for models whose chat template renders none: text describes the tools, their calls and their results.

The format is that of Hermes (`penstock.parsers.hermes`). A model without training on tools follows the description as
well as it can; required calls are valid all the same, since a grammar enforces them.
"""

import json
from collections.abc import Sequence
from typing import Any

from penstock.parsers import hermes
from penstock.text.content import Content, joined, text_of

_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"


def describe(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the tools in the system message, and earlier calls and results as text."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            _add_result(made, joined(joined(f"{_RESULT_OPEN}\n", message["content"], ""), f"\n{_RESULT_CLOSE}", ""))
        elif message.get("tool_calls"):
            made.append(_with_calls_as_text(message))
        else:
            made.append(message)
    return _with_instructions(made, tools) if tools else made


def _add_result(messages: list[dict[str, Any]], content: Content) -> None:
    """Add a result to the user's message; the results of several calls are one message."""
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and text_of(last["content"]).startswith(_RESULT_OPEN):
        messages[-1] = {**last, "content": joined(joined(last["content"], "\n", ""), content, "")}
    else:
        messages.append({"role": "user", "content": content})


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [f"{hermes.OPEN}\n{_json(call['function'])}\n{hermes.CLOSE}" for call in message["tool_calls"]]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join([*filter(None, [message.get("content")]), *calls])}


def _with_instructions(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    described = "\n".join(_json(tool["function"]) for tool in tools)
    text = (
        f"You can call tools. Each line describes one, with a JSON schema of its arguments:\n{described}\n\n"
        "To call a tool, write its name and its arguments in this form, and end your answer after the last call:\n"
        f'{hermes.OPEN}\n{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}\n{hermes.CLOSE}\n\n'
        f"The results come between {_RESULT_OPEN} and {_RESULT_CLOSE}. Without need of a tool, just answer."
    )
    first = messages[0] if messages else {}
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
