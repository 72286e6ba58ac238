"""From what the engine says to a response of OpenAI's, whole or as the events of a stream.

response.created, .in_progress, an item or several, and .completed or .incomplete

An item of text is .output_item.added, .content_part.added, .output_text.delta ..., .output_text.done,
.content_part.done and .output_item.done.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.frontend.output_processor import CompletionDelta
from penstock.parsers.conversation import Parsers
from penstock.parsers.parts import CallArguments, CallBegins, Part, Piece, Reasoning, Text, ToolCall, add, begins
from penstock.parsers.tools import call_id
from penstock.request import FinishReason, RequestOutput
from penstock.sampling_params import ResolvedParams
from penstock.server.body import Body
from penstock.server.dialect import event
from penstock.server.errors import ErrorReply
from penstock.server.openai.answers import Head, chat_logprobs
from penstock.server.openai.responses_schema import (
    OutputItem,
    OutputText,
    ReasoningContent,
    ResponseObject,
    ResponsesBody,
    ResponseUsage,
    Status,
)
from penstock.server.openai.schema import ChatTokenLogprob
from penstock.tokenizer import Tokenizer


class ResponsesAnswer:
    """One response: items of reasoning, text and calls, in the order the model wrote them; one at least."""

    def __init__(
        self, head: Head, body: ResponsesBody, params: ResolvedParams, tokenizer: Tokenizer, parsers: Parsers
    ) -> None:
        self._head = head
        self._body = body
        self._params = params
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._sequence_number = -1
        self._parts: list[Part] = []  # of the stream; the last is open
        self._sent_logprobs: list[ChatTokenLogprob] = []

    def begin_stream(self) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def stream_delta(self, position: int, delta: CompletionDelta) -> bytes:
        logprobs = self._logprobs(delta)
        pieces = self._parsers.feed_text(delta) or ([Text("")] if logprobs else [])
        events = [self._events_of(piece, logprobs) for piece in pieces]
        self._sent_logprobs += logprobs
        return b"".join(events)

    def _events_of(self, piece: Piece, logprobs: list[ChatTokenLogprob]) -> bytes:
        """The events of a piece; before the first of an item, those that close the last item and open this one."""
        count = len(self._parts)
        closing = self._close("completed") if count and begins(self._parts, piece) else b""
        add(self._parts, piece)
        opening = self._open() if len(self._parts) > count else b""
        if isinstance(piece, CallBegins):
            return closing + opening
        if isinstance(piece, CallArguments):
            event = self._item_event("response.function_call_arguments.delta", delta=piece.text)
        elif isinstance(piece, Reasoning):
            event = self._part_event("response.reasoning_text.delta", delta=piece.text)
        else:
            event = self._part_event("response.output_text.delta", delta=piece.text, logprobs=logprobs)
        return closing + opening + event

    def _open(self) -> bytes:
        index, part = len(self._parts) - 1, self._parts[-1]
        item = self._item(index, part, "in_progress", [])
        if item["type"] == "function_call":
            return self._event("response.output_item.added", output_index=index, item={**item, "arguments": ""})
        added = self._event("response.output_item.added", output_index=index, item={**item, "content": []})
        empty = _content(type(part)(""), []) if isinstance(part, Text | Reasoning) else None
        return added + self._part_event("response.content_part.added", part=empty)

    def _close(self, status: Status) -> bytes:
        part, logprobs = self._parts[-1], self._sent_logprobs
        if isinstance(part, ToolCall):
            done = self._item_event("response.function_call_arguments.done", name=part.name, arguments=part.arguments)
        elif isinstance(part, Text):
            done = self._part_event("response.output_text.done", text=part.text, logprobs=logprobs)
        else:
            done = self._part_event("response.reasoning_text.done", text=part.text)
        if not isinstance(part, ToolCall):
            done += self._part_event("response.content_part.done", part=_content(part, logprobs))
        index = len(self._parts) - 1
        item = self._item(index, part, status, logprobs)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        response = self.complete_body(outputs)
        opening = b"" if self._parts else self._events_of(Text(""), [])
        return (
            opening + self._close(response["status"]) + self._event(f"response.{response['status']}", response=response)
        )

    def fail_stream(self, reply: ErrorReply) -> bytes:
        return self._event("error", code=reply.code or "server_error", message=reply.message, param=reply.param)

    def complete_body(self, outputs: Sequence[RequestOutput]) -> ResponseObject:
        (output,) = outputs
        (answer,) = output.outputs
        reason = _CUT_BY.get(answer.finish_reason)
        status: Status = "incomplete" if reason else "completed"
        parts = self._parsers.parts(answer) or [Text("")]
        logprobs, last = self._logprobs(answer), len(parts) - 1
        items = [
            self._item(index, part, status if index == last else "completed", logprobs)
            for index, part in enumerate(parts)
        ]
        return self._response(status, items, self._usage(output), reason)

    def _usage(self, output: RequestOutput) -> ResponseUsage:
        answer = output.outputs[0]
        prompt, generated = len(output.prompt_token_ids), len(answer.token_ids)
        reasoning = self._parsers.reasoning_tokens(answer)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + generated,
        }

    def headers(self, outputs: Sequence[RequestOutput] | None) -> Mapping[str, str]:
        return {}

    def _logprobs(self, part: Any) -> list[ChatTokenLogprob]:
        return [] if part.logprobs is None else chat_logprobs(self._tokenizer, part.logprobs)

    def _part_event(self, kind: str, **data: object) -> bytes:
        return self._item_event(kind, content_index=0, **data)

    def _item_event(self, kind: str, **data: object) -> bytes:
        index = len(self._parts) - 1
        return self._event(kind, item_id=self._item_id(index, self._parts[-1]), output_index=index, **data)

    def _event(self, kind: str, **data: object) -> bytes:
        self._sequence_number += 1
        return event({"type": kind, "sequence_number": self._sequence_number, **data}, kind)

    def _item_id(self, index: int, part: Part) -> str:
        """The same in every event."""
        kind = "fc" if isinstance(part, ToolCall) else "rs" if isinstance(part, Reasoning) else "msg"
        return f"{kind}_{self._head.id.removeprefix('resp_')}{index:02x}"

    def _item(self, index: int, part: Part, status: Status, logprobs: list[ChatTokenLogprob]) -> OutputItem:
        id = self._item_id(index, part)
        if isinstance(part, Text):
            text = _output_text(part, logprobs)
            return {"id": id, "type": "message", "role": "assistant", "status": status, "content": [text]}
        if isinstance(part, Reasoning):
            thought = _reasoning_text(part)
            return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": [thought]}
        return {
            "id": id,
            "type": "function_call",
            "status": status,
            "call_id": call_id(self._head.id, 0, index),
            "name": part.name,
            "arguments": part.arguments,
        }

    def _response(
        self,
        status: Status,
        output: list[OutputItem],
        usage: ResponseUsage | None,
        cut_by: Literal["max_output_tokens", "abort"] | None = None,
    ) -> ResponseObject:
        body, params = self._body, self._params
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": cut_by} if cut_by else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {**((body.text and body.text.format) or {"type": "text"})}},
            "tool_choice": _as_sent(body.tool_choice) or "auto",
            "tools": [_as_sent(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


_CUT_BY: Mapping[FinishReason | None, Literal["max_output_tokens", "abort"]] = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.ABORT: "abort",
}


def _content(part: Text | Reasoning, logprobs: list[ChatTokenLogprob]) -> OutputText | ReasoningContent:
    return _output_text(part, logprobs) if isinstance(part, Text) else _reasoning_text(part)


def _output_text(part: Text, logprobs: list[ChatTokenLogprob]) -> OutputText:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}


def _reasoning_text(part: Reasoning) -> ReasoningContent:
    return {"type": "reasoning_text", "text": part.text}


def _as_sent(given: Body | str | None) -> Any:
    return given.model_dump(exclude_none=True) if isinstance(given, Body) else given
