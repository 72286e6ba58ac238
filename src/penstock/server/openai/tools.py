"""From OpenAI's words about tools to ours, and from calls to OpenAI's."""

import json
from collections.abc import Sequence
from typing import Any, cast

from penstock.errors import InvalidRequestError
from penstock.parsers.tools import Choice, Function, Tools, called
from penstock.server.body import check_text
from penstock.server.openai.tools_schema import ToolCallMade, ToolChoice, ToolDefinition


def tools_of(given: Sequence[ToolDefinition] | None, choice: str | ToolChoice | None, parallel: bool | None) -> Tools:
    """The tools of a body; `choice` may also be a function's name, as TGI has it.

    Raises:
        InvalidRequestError: they contradict each other.
    """
    functions = tuple(
        Function(
            name=one.function.name,
            description=one.function.description,
            parameters=one.function.parameters,
            strict=bool(one.function.strict),
        )
        for one in given or ()
    )
    if isinstance(choice, ToolChoice):
        return _chosen(functions, choice, parallel)
    if choice in (None, "auto", "none", "required"):
        return Tools(functions, cast(Choice, choice or "auto"), parallel=parallel is not False)
    return Tools.forced(functions, choice)


def _chosen(functions: tuple[Function, ...], choice: ToolChoice, parallel: bool | None) -> Tools:
    one, several = choice.function, choice.allowed_tools
    if (choice.type == "function") != (one is not None) or (choice.type == "allowed_tools") != (several is not None):
        raise InvalidRequestError(
            f"tool_choice of type {choice.type!r} must hold that, and nothing else", "tool_choice"
        )
    if one is not None:
        return Tools.forced(functions, one.name)
    assert several is not None
    return allowed(functions, [tool.function.name for tool in several.tools], several.mode, parallel)


def allowed(functions: tuple[Function, ...], names: Sequence[str], mode: Choice, parallel: bool | None) -> Tools:
    """Some of the functions may be called, or must.

    Raises:
        InvalidRequestError: none may, or there is no such function.
    """
    if not names:
        raise InvalidRequestError("tool_choice allows no tools: name at least one", "tool_choice")
    return Tools(functions, mode, tuple(names), parallel is not False)


def calls_made(calls: Sequence[ToolCallMade], field: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn as chat templates know them."""
    made = []
    for call in calls:
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        for said in (call.id, call.function.name, text):
            check_text(said, field)
        made.append(called(call.function.name, text, call.id))
    return made
