"""Formats engine outputs as an Anthropic message, whole or as the events of a stream.

message_start, content_block_start, content_block_delta ..., content_block_stop, message_delta, message_stop
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api.request import CompletionOutput, FinishReason, Request, RequestOutput
from penstock.api.tools import arguments_object, call_id
from penstock.frontend.output_processor import CompletionDelta
from penstock.parsers.conversation import Parsers
from penstock.parsers.parts import CallArguments, CallBegins, Part, Piece, Reasoning, ToolCall
from penstock.server.anthropic.errors import shape
from penstock.server.anthropic.schema import (
    BlockAnswer,
    MessageAnswer,
    StopReason,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
    Usage,
)
from penstock.server.errors import ErrorReply
from penstock.server.streams import Frame, event


class MessagesAnswer:
    """One message: blocks of reasoning, of text and of calls, in the order the model wrote them; one at least."""

    frame = Frame.SERVER_SENT_EVENTS

    def __init__(self, model: str, request: Request, parsers: Parsers, *, show_thinking: bool = True) -> None:
        self.id = request.request_id
        self._model = model
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._parsers = parsers
        self._show_thinking = show_thinking
        self._opened: list[str] = []  # the type of each block of the stream; all but the last are closed

    def begin_stream(self) -> bytes:
        return _event({"type": "message_start", "message": self._message(_usage(self._num_prompt_tokens, 0, 0))})

    def stream_delta(self, position: int, delta: CompletionDelta) -> bytes:
        return b"".join(self._tell(piece) for piece in self._parsers.feed_text(delta))

    def _tell(self, piece: Piece) -> bytes:
        if isinstance(piece, CallBegins):
            return self._open(_tool_use(self.id, self._opened.count("tool_use"), piece.name, {}))
        if isinstance(piece, CallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": piece.text})
        kind = "thinking" if isinstance(piece, Reasoning) else "text"
        opening = b"" if self._opened[-1:] == [kind] else self._open(_thinking("") if kind == "thinking" else _text(""))
        if kind == "thinking" and not self._show_thinking:
            return opening
        return opening + self._delta({"type": f"{kind}_delta", kind: piece.text})

    def _open(self, block: BlockAnswer) -> bytes:
        closing = self._close()
        self._opened.append(block["type"])
        start = {"type": "content_block_start", "index": len(self._opened) - 1, "content_block": block}
        return closing + _event(start) + (b"" if closing else _event({"type": "ping"}))

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return _event({"type": "content_block_delta", "index": len(self._opened) - 1, "delta": delta})

    def _close(self) -> bytes:
        return _event({"type": "content_block_stop", "index": len(self._opened) - 1}) if self._opened else b""

    def keep_alive(self) -> bytes:
        return _event({"type": "ping"})

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        whole = self.complete_body(outputs)
        ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        return (
            (b"" if self._opened else self._open(_text("")))
            + self._close()
            + _event({"type": "message_delta", "delta": ending, "usage": whole["usage"]})
            + _event({"type": "message_stop"})
        )

    def fail_stream(self, reply: ErrorReply) -> bytes:
        return event(shape(reply)[1], "error")

    def complete_body(self, outputs: Sequence[RequestOutput]) -> MessageAnswer:
        (output,) = outputs
        (answer,) = output.outputs
        usage = _usage(len(output.prompt_token_ids), output.num_cached_tokens, len(answer.token_ids))
        message = self._message(usage)
        message["content"] = self._blocks(self._parsers.parts(answer))
        called = any(block["type"] == "tool_use" for block in message["content"])
        message["stop_reason"], message["stop_sequence"] = _ending(answer, called)
        return message

    def _blocks(self, parts: Sequence[Part]) -> list[BlockAnswer]:
        blocks: list[BlockAnswer] = []
        calls = 0
        for part in parts:
            if isinstance(part, ToolCall):
                blocks.append(_tool_use(self.id, calls, part.name, arguments_object(part.arguments)))
                calls += 1
            else:
                shown = part.text if self._show_thinking else ""
                blocks.append(_thinking(shown) if isinstance(part, Reasoning) else _text(part.text))
        return blocks or [_text("")]

    def headers(self, outputs: Sequence[RequestOutput] | None) -> Mapping[str, str]:
        return {}

    def _message(self, usage: Usage) -> MessageAnswer:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _event(data: Mapping[str, object]) -> bytes:
    """Anthropic names each event twice: as the event's own name, and in its data."""
    return event(data, str(data["type"]))


def _text(text: str) -> TextAnswer:
    return {"type": "text", "text": text}


def _thinking(text: str) -> ThinkingAnswer:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(message: str, call_index: int, name: str, input: dict[str, Any]) -> ToolUseAnswer:
    return {"type": "tool_use", "id": call_id(message, 0, call_index), "name": name, "input": input}


def _usage(prompt: int, cached: int, generated: int) -> Usage:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _ending(answer: CompletionOutput, called: bool) -> tuple[StopReason, str | None]:
    if answer.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if answer.finish_reason is FinishReason.ABORT:  # sent back as it is, the model goes on with it
        return "pause_turn", None
    if isinstance(answer.stop_reason, str):
        return "stop_sequence", answer.stop_reason
    return "tool_use" if called else "end_turn", None
