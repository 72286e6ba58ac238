"""From what the engine says to a message of Anthropic's, whole or as the events of a stream.

message_start, content_block_start, content_block_delta ..., content_block_stop, message_delta, message_stop
"""

import uuid
from collections.abc import Mapping, Sequence

from penstock.engine.assembler import CompletionDelta
from penstock.request import CompletionOutput, FinishReason, RequestOutput
from penstock.server.anthropic.errors import shape
from penstock.server.anthropic.schema import MessageAnswer, StopReason, TextAnswer, Usage
from penstock.server.errors import Fault
from penstock.server.sse import event


class MessagesAnswer:
    """One message: one block of text."""

    def __init__(self, model: str, num_prompt_tokens: int) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens

    def begin(self) -> bytes:
        message = self._message(_usage(self._num_prompt_tokens, 0, 0))
        start = {"type": "content_block_start", "index": 0, "content_block": _block("")}
        return _event({"type": "message_start", "message": message}) + _event(start) + _event({"type": "ping"})

    def feed(self, position: int, delta: CompletionDelta) -> bytes:
        if not delta.text:
            return b""
        text = {"type": "text_delta", "text": delta.text}
        return _event({"type": "content_block_delta", "index": 0, "delta": text})

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        whole = self.whole(outputs)
        ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": ending, "usage": whole["usage"]})
            + _event({"type": "message_stop"})
        )

    def fail(self, fault: Fault) -> bytes:
        return event(shape(fault)[1], "error")

    def whole(self, outputs: Sequence[RequestOutput]) -> MessageAnswer:
        (output,) = outputs
        (answer,) = output.outputs
        usage = _usage(len(output.prompt_token_ids), output.num_cached_tokens, len(answer.token_ids))
        message = self._message(usage)
        message["content"].append(_block(answer.text))
        message["stop_reason"], message["stop_sequence"] = _ending(answer)
        return message

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


def _block(text: str) -> TextAnswer:
    return {"type": "text", "text": text, "citations": None}


def _usage(prompt: int, cached: int, generated: int) -> Usage:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _ending(answer: CompletionOutput) -> tuple[StopReason, str | None]:
    if answer.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(answer.stop_reason, str):
        return "stop_sequence", answer.stop_reason
    return "end_turn", None
