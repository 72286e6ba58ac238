"""Maps the tools of a Responses body to functions in the prompt, and their calls to output items.

tool          function in the prompt       call in the answer
function      itself                       function_call
in namespace  NAMESPACE__NAME              function_call with name and namespace
custom        one string, `input`          custom_tool_call with that string
local_shell   command, timeout, folder     local_shell_call with an action
others        none                         none: they run on OpenAI's servers
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from penstock.api.tools import Choice, Function, Tools
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.server.openai.body_to_params import allowed
from penstock.server.openai.responses_items_schema import AdditionalToolsItem, Item
from penstock.server.openai.responses_schema import ResponsesBody, ShellAction
from penstock.server.openai.responses_tools_schema import (
    CustomTool,
    FunctionTool,
    HostedTool,
    LocalShellTool,
    NamespaceTool,
    Tool,
    ToolByName,
    ToolChoiceObject,
)

SHELL = "local_shell"
_SHELL_FUNCTION = Function(
    SHELL,
    "Run a command on the user's machine and get its output.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
)
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool, and the function that represents it in the prompt."""

    function: Function
    kind: Literal["function", "custom", "local_shell"]
    name: str
    """Its name within its namespace."""
    namespace: str | None = None


def joined_name(name: str, namespace: str | None) -> str:
    """The name of a namespace's tool in prompts."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def offered_tools(body: ResponsesBody, items: Sequence[Item]) -> list[OfferedTool]:
    """The tools that the model sees: the body's, and those of items, the last of each name."""
    own = [offered for tool in body.tools or () for offered in _offered(tool)]
    added = [offered for tool in _added_tools(items) for offered in _offered(tool)]
    return [*own, *{tool.function.name: tool for tool in added}.values()]


def ignored_tools(body: ResponsesBody, items: Sequence[Item]) -> list[str]:
    """The fields of tools that have no effect: types that are left out, and grammars, which are not enforced."""
    return list(_ignored([*(body.tools or ()), *_added_tools(items)]))


def _added_tools(items: Sequence[Item]) -> list[Tool]:
    return [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]


def _ignored(given: Sequence[Tool]) -> Iterator[str]:
    for tool in given:
        if isinstance(tool, NamespaceTool):
            yield from (f"tools.{name}" for name in _ignored(tool.tools))
        elif isinstance(tool, HostedTool):
            yield "tools.type"
        elif isinstance(tool, CustomTool) and tool.format is not None and tool.format.type == "grammar":
            yield "tools.format"


def _offered(tool: Tool) -> list[OfferedTool]:
    if isinstance(tool, NamespaceTool):
        return _offered_namespace(tool)
    if isinstance(tool, LocalShellTool):
        return [OfferedTool(_SHELL_FUNCTION, "local_shell", SHELL)]
    return [] if isinstance(tool, HostedTool) else [_offered_one(tool, None, "")]


def _offered_namespace(namespace: NamespaceTool) -> list[OfferedTool]:
    """Its tools; the first one's description begins with that of the namespace."""
    offered: list[OfferedTool] = []
    for tool in namespace.tools:
        if not isinstance(tool, HostedTool):
            about = "" if offered or not namespace.description else f"{namespace.name}: {namespace.description}"
            offered.append(_offered_one(tool, namespace.name, about))
    return offered


def _offered_one(tool: FunctionTool | CustomTool, namespace: str | None, about: str) -> OfferedTool:
    name = joined_name(tool.name, namespace)
    texts = (about, tool.description, _grammar(tool) if isinstance(tool, CustomTool) else "")
    description = "\n\n".join(text for text in texts if text) or None
    if isinstance(tool, CustomTool):
        return OfferedTool(Function(name, description, _INPUT), "custom", tool.name, namespace)
    function = Function(name, description, tool.parameters, strict=bool(tool.strict))
    return OfferedTool(function, "function", tool.name, namespace)


def _grammar(tool: CustomTool) -> str:
    form = tool.format
    if form is None or form.type != "grammar":
        return ""
    return f"The input must match this grammar ({form.syntax}):\n{form.definition}"


# ── tool_choice ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tools_of(body: ResponsesBody, offered: Sequence[OfferedTool]) -> Tools:
    """The functions of a body, and the tool choice.

    Raises:
        InvalidRequestError: the tools contradict each other, or `tool_choice` names a tool that is left out.
    """
    functions = tuple(tool.function for tool in offered)
    choice, parallel = body.tool_choice, body.parallel_tool_calls
    if choice is None or isinstance(choice, str):
        return Tools(functions, choice or "auto", parallel=parallel is not False)
    if choice.type in ("auto", "none", "required"):
        return Tools(functions, _word(choice), parallel=parallel is not False)
    if choice.type != "allowed_tools":
        return Tools.forced(functions, _chosen(choice, offered, "tool_choice"))
    if choice.tools is None or choice.mode is None or choice.name is not None:
        raise InvalidRequestError("tool_choice of type allowed_tools needs mode and tools, and no name", "tool_choice")
    names = [_chosen(tool, offered, f"tool_choice.tools[{index}]") for index, tool in enumerate(choice.tools)]
    return allowed(functions, names, choice.mode, parallel)


def _word(choice: ToolChoiceObject) -> Choice:
    words: dict[str, Choice] = {"auto": "auto", "none": "none", "required": "required"}
    return words[choice.type]


def _chosen(choice: ToolChoiceObject | ToolByName, offered: Sequence[OfferedTool], field: str) -> str:
    """The function of the tool in `tool_choice`, whose namespace may be omitted."""
    if choice.type == SHELL:
        return SHELL
    if choice.type not in ("function", "custom"):
        raise InvalidRequestError(
            f"{field}.type: tools of type {choice.type[:80]!r} do not run here and are left out, so none can be chosen",
            f"{field}.type",
        )
    if choice.name is None:
        raise InvalidRequestError(f"{field}.name: this parameter is required", f"{field}.name")
    name = joined_name(choice.name, choice.namespace)
    if any(tool.function.name == name for tool in offered):
        return name
    named = [tool.function.name for tool in offered if tool.name == choice.name]
    return named[0] if len(named) == 1 else name


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def shell_action(arguments: str) -> ShellAction:
    """The action of a call of `local_shell`. If it is not valid JSON, the command is empty: a part could do harm."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        given = None
    given = given if isinstance(given, dict) else {}
    action: ShellAction = {"type": "exec", "command": _command(given.get("command")), "env": {}}
    folder = given.get("working_directory", given.get("workdir"))
    if isinstance(folder, str):
        action["working_directory"] = folder
    if isinstance(given.get("timeout_ms"), int):
        action["timeout_ms"] = given["timeout_ms"]
    return action


def _command(given: Any) -> list[str]:
    if isinstance(given, str):
        return ["bash", "-lc", given]
    return [str(word) for word in given] if isinstance(given, list) else []


def shell_arguments(action: Any) -> dict[str, Any]:
    """The arguments of the call of `local_shell` with this action."""
    if not isinstance(action, Mapping):
        return {"command": action}
    return {name: value for name, value in action.items() if name not in ("type", "env") or (name == "env" and value)}
