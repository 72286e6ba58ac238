"""From OpenAI's words about tools to ours, and from calls to OpenAI's."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.parsers.tools import Function, Tools, called
from penstock.server.body import check_text
from penstock.server.openai.tools_schema import ToolCallMade, ToolChoice, ToolDefinition

CHOICES = ("auto", "none", "required")


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
    return choose(functions, choice, parallel is not False)


def choose(functions: tuple[Function, ...], choice: str | ToolChoice | None, parallel: bool) -> Tools:
    """The functions, and what is said of calling them."""
    if choice == "none":
        return Tools(functions, "none")
    if choice is None or choice == "auto":
        return Tools(functions, parallel=parallel)
    if choice == "required":
        return Tools(functions, "required", parallel=parallel)
    if isinstance(choice, str):
        return Tools(functions, "required", (choice,), parallel=False)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None and choice.function is None:
        names = tuple(one.function.name for one in choice.allowed_tools.tools)
        if not names:
            raise InvalidRequestError("tool_choice allows no tools: name at least one", "tool_choice")
        return Tools(functions, choice.allowed_tools.mode, names, parallel)
    if choice.type == "function" and choice.function is not None and choice.allowed_tools is None:
        return Tools(functions, "required", (choice.function.name,), parallel=False)
    raise InvalidRequestError(
        f"tool_choice of type {choice.type!r} must hold {choice.type!r}, and no other", "tool_choice"
    )


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
