"""Converts the parts of an answer to the output items of a response."""

from collections.abc import Mapping

from penstock.api.tools import call_id
from penstock.parsers.parts import Part, Reasoning, Text, ToolCall
from penstock.server.openai.custom_input import custom_input
from penstock.server.openai.responses_schema import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputShellCall,
    OutputText,
    ReasoningContent,
    ShellAction,
    Status,
)
from penstock.server.openai.responses_tools import OfferedTool, shell_action
from penstock.server.openai.schema import ChatTokenLogprob

_NO_COMMAND: ShellAction = {"type": "exec", "command": [], "env": {}}
_PREFIXES = {"custom": "ctc", "local_shell": "lsh", "function": "fc"}


class OutputItems:
    """The items of one response, with ids that are the same in every event."""

    def __init__(self, response_id: str, tools: Mapping[str, OfferedTool]) -> None:
        """
        Args:
            tools: offered tools by function name.
        """
        self._response_id = response_id
        self._tools = tools

    def kind_of(self, call: ToolCall) -> str:
        """The kind of the called tool: function, custom or local_shell."""
        tool = self._tools.get(call.name)
        return "function" if tool is None else tool.kind

    def name_of(self, call: ToolCall) -> str:
        """The name of the called tool within its namespace."""
        tool = self._tools.get(call.name)
        return call.name if tool is None else tool.name

    def id_of(self, index: int, part: Part) -> str:
        kind = "rs" if isinstance(part, Reasoning) else "msg"
        if isinstance(part, ToolCall):
            kind = _PREFIXES[self.kind_of(part)]
        return f"{kind}_{self._response_id.removeprefix('resp_')}{index:02x}"

    def opening(self, index: int, part: Part) -> OutputItem:
        """An item at its beginning: without content, arguments or input."""
        item = self.item(index, ToolCall(part.name, "") if isinstance(part, ToolCall) else part, "in_progress", [])
        if item["type"] == "message" or item["type"] == "reasoning":
            item["content"] = []
        return item

    def item(self, index: int, part: Part, status: Status, logprobs: list[ChatTokenLogprob]) -> OutputItem:
        id = self.id_of(index, part)
        if isinstance(part, Text):
            text = output_text(part, logprobs)
            return {"id": id, "type": "message", "role": "assistant", "status": status, "content": [text]}
        if isinstance(part, Reasoning):
            thought = reasoning_text(part)
            return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": [thought]}
        return self._call(id, index, part, status)

    def _call(self, id: str, index: int, call: ToolCall, status: Status) -> OutputItem:
        tool, call_id_ = self._tools.get(call.name), call_id(self._response_id, 0, index)
        if tool is not None and tool.kind == "local_shell":
            return _shell_call(id, call_id_, call.arguments, status)
        name = self.name_of(call)
        item: OutputCall | OutputCustomCall
        if tool is not None and tool.kind == "custom":
            item = OutputCustomCall(
                id=id,
                type="custom_tool_call",
                status=status,
                call_id=call_id_,
                name=name,
                input=custom_input(call.arguments),
            )
        else:
            item = {
                "id": id,
                "type": "function_call",
                "status": status,
                "call_id": call_id_,
                "name": name,
                "arguments": call.arguments,
            }
        if tool is not None and tool.namespace is not None:
            item["namespace"] = tool.namespace
        return item


def _shell_call(id: str, call_id: str, arguments: str, status: Status) -> OutputShellCall:
    action = shell_action(arguments) if arguments else _NO_COMMAND
    return {"id": id, "type": "local_shell_call", "status": status, "call_id": call_id, "action": action}


def output_text(part: Text, logprobs: list[ChatTokenLogprob]) -> OutputText:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}


def reasoning_text(part: Reasoning) -> ReasoningContent:
    return {"type": "reasoning_text", "text": part.text}
