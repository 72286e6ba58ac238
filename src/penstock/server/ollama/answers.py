"""Formats engine outputs as Ollama's answers: whole, or the lines of a stream."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from penstock.api.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from penstock.api.tools import arguments_object, call_id
from penstock.dataclass import dataclass
from penstock.frontend.output_processor import CompletionDelta
from penstock.parsers.conversation import Parsers
from penstock.parsers.parts import (
    BETWEEN_PARTS,
    CallArguments,
    CallBegins,
    Part,
    Piece,
    PieceSeparators,
    Reasoning,
    Text,
    ToolCall,
    put_together,
)
from penstock.server.errors import ErrorReply
from penstock.server.logprobs import LEAST_LOGPROB
from penstock.server.ollama.errors import shape
from penstock.server.ollama.schema import AnswerMessage, DoneReason, Logprob, ToolCallAnswer
from penstock.server.ollama.schema import TokenLogprob as ShownLogprob
from penstock.server.streams import Frame, json_line
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    """Request parameters on which the answer's format depends."""

    id: str
    model: str
    """The model's name as the caller wrote it."""
    received: float
    """Seconds of `time.monotonic()`."""
    tokenizer: Tokenizer
    parsers: Parsers | None
    """None: the answer is text alone."""


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


class _LinesAnswer:
    """An answer as lines: each has a piece of the message, and the last one counts and durations."""

    frame = Frame.JSON_LINES

    def __init__(self, question: Question) -> None:
        self._question = question
        self._separators = PieceSeparators()
        self._num_calls = 0
        self._call: list[Piece] = []  # pieces of the call that the stream has not sent yet
        self._aborted = False

    def begin_stream(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return json_line(self._line(_message(), done=False))

    def stream_delta(self, position: int, delta: CompletionDelta) -> bytes:
        if delta.finish_reason is FinishReason.ABORT:
            self._aborted = True
            return json_line({"error": delta.error or "the request was aborted"})
        lines = [self._line(message, done=False) for message in self._messages(delta)]
        if delta.logprobs:
            if not lines:
                lines.append(self._line(_message(), done=False))
            lines[0]["logprobs"] = self._logprobs(delta.logprobs)
        return b"".join(map(json_line, lines))

    def _messages(self, delta: CompletionDelta) -> Iterator[AnswerMessage]:
        """The parts of the message that a delta completes; a call is sent whole."""
        parsers = self._question.parsers
        pieces = parsers.feed_text(delta) if parsers else [Text(delta.text)] if delta.text else []
        for piece in pieces:
            separator = self._separators.before(piece)
            if isinstance(piece, CallArguments):
                self._call.append(piece)
                continue
            yield from self._called()
            if isinstance(piece, CallBegins):
                self._call.append(piece)
            elif isinstance(piece, Text):
                yield _message(separator + piece.text)
            else:
                yield _message(thinking=separator + piece.text)
        if delta.finish_reason is not None:
            yield from self._called()

    def _called(self) -> Iterator[AnswerMessage]:
        parts, self._call = put_together(self._call), []
        for part in parts:
            assert isinstance(part, ToolCall), "only pieces of calls are kept"
            yield _message(calls=[self._tool_call(part, self._num_calls)])
            self._num_calls += 1

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        return b"" if self._aborted else json_line(self._last_line(outputs, _message()))

    def fail_stream(self, reply: ErrorReply) -> bytes:
        return json_line(shape(reply)[1])

    def complete_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        ((answer,),) = (output.outputs for output in outputs)
        parsers = self._question.parsers
        parts: Sequence[Part] = parsers.parts(answer) if parsers else [Text(answer.text)]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        message = _message(
            BETWEEN_PARTS.join(part.text for part in parts if isinstance(part, Text)),
            BETWEEN_PARTS.join(part.text for part in parts if isinstance(part, Reasoning)),
            [self._tool_call(call, index) for index, call in enumerate(calls)],
        )
        line = self._last_line(outputs, message)
        if answer.logprobs is not None:
            line["logprobs"] = self._logprobs(answer.logprobs)
        return line

    def headers(self, outputs: Sequence[RequestOutput] | None) -> Mapping[str, str]:
        return {}

    def _line(self, message: AnswerMessage, *, done: bool) -> dict[str, Any]:
        return {"model": self._question.model, "created_at": now(), **self._content(message), "done": done}

    def _content(self, message: AnswerMessage) -> dict[str, Any]:
        raise NotImplementedError

    def _last_line(self, outputs: Sequence[RequestOutput], message: AnswerMessage) -> dict[str, Any]:
        (output,) = outputs
        (answer,) = output.outputs
        return self._line(message, done=True) | {
            "done_reason": _done_reason(answer),
            **_durations(output, self._question.received),
            "prompt_eval_count": len(output.prompt_token_ids),
            "eval_count": len(answer.token_ids),
        }

    def _tool_call(self, call: ToolCall, index: int) -> ToolCallAnswer:
        arguments = arguments_object(call.arguments)
        id = call_id(self._question.id, 0, index)
        return {"id": id, "function": {"index": index, "name": call.name, "arguments": arguments}}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[Logprob]:
        return [
            {
                **self._logprob(entry.token_id, entry.logprob),
                "top_logprobs": [self._logprob(*alternative) for alternative in entry.top],
            }
            for entry in entries
        ]

    def _logprob(self, token_id: int, logprob: float) -> ShownLogprob:
        raw = self._question.tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class ChatAnswer(_LinesAnswer):
    """The answer of `/api/chat`."""

    def _content(self, message: AnswerMessage) -> dict[str, Any]:
        return {"message": message}


class GenerateAnswer(_LinesAnswer):
    """The answer of `/api/generate`."""

    def __init__(self, question: Question, *, with_context: bool) -> None:
        """
        Args:
            with_context: whether its end has the tokens of prompt and answer.
        """
        super().__init__(question)
        self._with_context = with_context

    def _content(self, message: AnswerMessage) -> dict[str, Any]:
        content = {"response": message["content"]}
        return content | {"thinking": message["thinking"]} if "thinking" in message else content

    def _last_line(self, outputs: Sequence[RequestOutput], message: AnswerMessage) -> dict[str, Any]:
        line = super()._last_line(outputs, message)
        if self._with_context:
            line["context"] = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
        return line


def _message(text: str = "", thinking: str = "", calls: Sequence[ToolCallAnswer] = ()) -> AnswerMessage:
    message: AnswerMessage = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _done_reason(answer: CompletionOutput) -> DoneReason:
    return "length" if answer.finish_reason is FinishReason.LENGTH else "stop"


def _durations(output: RequestOutput, received: float) -> dict[str, int]:
    """Nanoseconds of the call, of its wait for the first step, of the prompt and of the answer."""
    ended, times = time.monotonic(), output.times
    began = ended if times.first_scheduled is None else times.first_scheduled
    answered = began if times.first_token is None else times.first_token
    return {
        "total_duration": nanoseconds(ended - received),
        "load_duration": nanoseconds(began - received),
        "prompt_eval_duration": nanoseconds(answered - began),
        "eval_duration": nanoseconds((times.finished or ended) - answered),
    }


def nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
