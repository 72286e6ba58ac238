"""From what the engine says to a response of OpenAI's, whole or as the events of a stream.

response.created, .in_progress, .output_item.added, .content_part.added, .output_text.delta ...,
.output_text.done, .content_part.done, .output_item.done, and .completed or .incomplete
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.assembler import CompletionDelta
from penstock.request import FinishReason, RequestOutput, ResolvedParams
from penstock.server.errors import Fault
from penstock.server.openai.answers import Head, chat_logprobs
from penstock.server.openai.responses_schema import (
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponsesBody,
    ResponseUsage,
    Status,
)
from penstock.server.openai.schema import ChatTokenLogprob
from penstock.server.sse import event
from penstock.tokenizer import Tokenizer


class ResponsesAnswer:
    """One response: one message of one piece of text."""

    def __init__(self, head: Head, body: ResponsesBody, params: ResolvedParams, tokenizer: Tokenizer) -> None:
        self._head = head
        self._body = body
        self._params = params
        self._tokenizer = tokenizer
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._sequence_number = -1

    def begin(self) -> bytes:
        response = self._response("in_progress", [], None)
        item = self._item("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._part_event("response.content_part.added", part=_text("", []))
        )

    def feed(self, position: int, delta: CompletionDelta) -> bytes:
        logprobs = self._logprobs(delta)
        if not (delta.text or logprobs):
            return b""
        return self._part_event("response.output_text.delta", delta=delta.text, logprobs=logprobs)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        response = self.whole(outputs)
        (item,) = response["output"]
        (part,) = item["content"]
        return (
            self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            + self._part_event("response.content_part.done", part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response['status']}", response=response)
        )

    def fail(self, fault: Fault) -> bytes:
        return self._event("error", code=fault.code or "server_error", message=fault.message, param=fault.param)

    def whole(self, outputs: Sequence[RequestOutput]) -> ResponseObject:
        (output,) = outputs
        (answer,) = output.outputs
        status: Status = "incomplete" if answer.finish_reason is FinishReason.LENGTH else "completed"
        item = self._item(status, [_text(answer.text, self._logprobs(answer))])
        return self._response(status, [item], _usage(output))

    def headers(self, outputs: Sequence[RequestOutput] | None) -> Mapping[str, str]:
        return {}

    def _logprobs(self, part: Any) -> list[ChatTokenLogprob]:
        return [] if part.logprobs is None else chat_logprobs(self._tokenizer, part.logprobs)

    def _part_event(self, kind: str, **data: object) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **data)

    def _event(self, kind: str, **data: object) -> bytes:
        self._sequence_number += 1
        return event({"type": kind, "sequence_number": self._sequence_number, **data}, kind)

    def _item(self, status: Status, content: list[OutputText]) -> OutputMessage:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: Status, output: list[OutputMessage], usage: ResponseUsage | None) -> ResponseObject:
        body, params = self._body, self._params
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


def _text(text: str, logprobs: list[ChatTokenLogprob]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(output: RequestOutput) -> ResponseUsage:
    prompt, generated = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
