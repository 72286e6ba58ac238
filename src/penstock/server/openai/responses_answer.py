"""Formats engine outputs as a response of OpenAI's Responses API, whole or as the events of a stream.

response.created, .in_progress, an item or several, and .completed or .incomplete

An item of text is .output_item.added, .content_part.added, .output_text.delta ..., .output_text.done,
.content_part.done and .output_item.done. A call has no parts; its arguments, or its input, are .delta ... and .done.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from penstock.api.request import FinishReason, RequestOutput
from penstock.api.sampling_params import ResolvedParams
from penstock.frontend.output_processor import CompletionDelta
from penstock.parsers.conversation import Parsers
from penstock.parsers.parts import CallArguments, CallBegins, Part, Piece, Reasoning, Text, ToolCall, add, begins
from penstock.server.body import Body
from penstock.server.errors import ErrorReply
from penstock.server.openai.answers import Head, chat_logprobs, token_details
from penstock.server.openai.custom_input import CustomInput, custom_input
from penstock.server.openai.responses_items import OutputItems, output_text, reasoning_text
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
from penstock.server.streams import Frame, event
from penstock.text.tokenizer import Tokenizer


class ResponsesAnswer:
    """One response: items of reasoning, text and calls, in the order the model wrote them; one at least."""

    frame = Frame.SERVER_SENT_EVENTS

    def __init__(
        self,
        head: Head,
        body: ResponsesBody,
        params: ResolvedParams,
        tokenizer: Tokenizer,
        parsers: Parsers,
        items: OutputItems,
        store: Callable[[ResponseObject], None] | None,
    ) -> None:
        """
        Args:
            store: stores the complete response; None: it is not stored.
        """
        self._head = head
        self._body = body
        self._params = params
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._items = items
        self._store = store
        self._sequence_number = -1
        self._parts: list[Part] = []  # of the stream; the last is open
        self._custom_input = CustomInput()
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
        return closing + opening + self._delta(piece, logprobs)

    def _delta(self, piece: Piece, logprobs: list[ChatTokenLogprob]) -> bytes:
        if isinstance(piece, CallBegins):
            return b""
        if isinstance(piece, CallArguments):
            return self._call_delta(piece.text)
        if isinstance(piece, Reasoning):
            return self._part_event("response.reasoning_text.delta", delta=piece.text)
        return self._part_event("response.output_text.delta", delta=piece.text, logprobs=logprobs)

    def _call_delta(self, arguments: str) -> bytes:
        kind = self._open_call_kind
        if kind == "function":
            return self._item_event("response.function_call_arguments.delta", delta=arguments)
        if kind == "custom" and (text := self._custom_input.feed_text(arguments)):
            return self._item_event("response.custom_tool_call_input.delta", delta=text)
        return b""

    @property
    def _open_call_kind(self) -> str:
        call = self._parts[-1]
        assert isinstance(call, ToolCall)
        return self._items.kind_of(call)

    def _open(self) -> bytes:
        index, part = len(self._parts) - 1, self._parts[-1]
        item = self._items.opening(index, part)
        self._custom_input = CustomInput()
        added = self._event("response.output_item.added", output_index=index, item=item)
        if isinstance(part, ToolCall):
            return added
        return added + self._part_event("response.content_part.added", part=_content(type(part)(""), []))

    def _close(self, status: Status) -> bytes:
        part, logprobs = self._parts[-1], self._sent_logprobs
        if isinstance(part, ToolCall):
            done = self._call_done(part)
        elif isinstance(part, Text):
            done = self._part_event("response.output_text.done", text=part.text, logprobs=logprobs)
        else:
            done = self._part_event("response.reasoning_text.done", text=part.text)
        if not isinstance(part, ToolCall):
            done += self._part_event("response.content_part.done", part=_content(part, logprobs))
        index = len(self._parts) - 1
        item = self._items.item(index, part, status, logprobs)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _call_done(self, call: ToolCall) -> bytes:
        kind = self._items.kind_of(call)
        if kind == "function":
            name = self._items.name_of(call)
            return self._item_event("response.function_call_arguments.done", name=name, arguments=call.arguments)
        if kind == "local_shell":
            return b""
        rest = self._custom_input.finish()
        delta = self._item_event("response.custom_tool_call_input.delta", delta=rest) if rest else b""
        input = custom_input(call.arguments)
        return delta + self._item_event("response.custom_tool_call_input.done", input=input)

    def keep_alive(self) -> bytes:
        """A keep-alive event that repeats the last sequence number, as a resumed stream numbers events without it."""
        if self._sequence_number < 0:
            return b""
        kind = "response.in_progress"
        response = self._response("in_progress", [], None)
        return event({"type": kind, "sequence_number": self._sequence_number, "response": response}, kind)

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        response = self.complete_body(outputs)
        # A response has one item at least: clients read the last.
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
            self._items.item(index, part, status if index == last else "completed", logprobs)
            for index, part in enumerate(parts)
        ]
        response = self._response(status, items, self._usage(output), reason)
        if self._store is not None:
            self._store(response)
        return response

    def _usage(self, output: RequestOutput) -> ResponseUsage:
        answer = output.outputs[0]
        prompt, generated = len(output.prompt_token_ids), len(answer.token_ids)
        reasoning = self._parsers.reasoning_tokens(answer)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {**token_details([output]), "cache_write_tokens": 0},
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
        return self._event(kind, item_id=self._items.id_of(index, self._parts[-1]), output_index=index, **data)

    def _event(self, kind: str, **data: object) -> bytes:
        self._sequence_number += 1
        return event({"type": kind, "sequence_number": self._sequence_number, **data}, kind)

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
            "previous_response_id": body.previous_response_id,
            "service_tier": "default",
            "store": self._store is not None,
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
    return output_text(part, logprobs) if isinstance(part, Text) else reasoning_text(part)


def _as_sent(given: Body | str | None) -> Any:
    return given.model_dump(exclude_none=True) if isinstance(given, Body) else given
