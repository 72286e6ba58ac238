"""Formats engine outputs as OpenAI responses: whole, or chunks of a stream."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import field
from operator import attrgetter

from penstock.api.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from penstock.api.tools import call_id
from penstock.dataclass import dataclass
from penstock.frontend.output_processor import CompletionDelta
from penstock.parsers.conversation import Parsers
from penstock.parsers.parts import BETWEEN_PARTS, CallArguments, Part, Piece, PieceSeparators, Reasoning, Text, ToolCall
from penstock.server.errors import ErrorReply
from penstock.server.logprobs import LEAST_LOGPROB
from penstock.server.openai.schema import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishedBy,
    ChatLogprobs,
    ChatTokenLogprob,
    Completion,
    Delta,
    FinishedBy,
    PromptLogprobs,
    PromptToken,
    TokenDetails,
    TopLogprob,
    Usage,
)
from penstock.server.openai.tools_schema import FunctionDelta
from penstock.server.openai_errors import shape
from penstock.server.streams import COMMENT, DONE, Frame, encode, event
from penstock.text.tokenizer import Tokenizer

_CACHED, _IMAGES = attrgetter("num_cached_tokens"), attrgetter("num_image_tokens")
_SOUNDS = attrgetter("num_audio_tokens")
_SLOT = "text"
"""Stands for the text in an event that is encoded once; the last thing of its kind in it."""


@dataclass(frozen=True, slots=True)
class Head:
    """Fields repeated in every chunk of an answer."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "Head":
        return cls(f"{prefix}{uuid.uuid4().hex}", int(time.time()), model)


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Token usage of the call; a prompt counts once, regardless of its number of answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.num_generated_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": token_details(outputs),
    }


def token_details(outputs: Sequence[RequestOutput]) -> TokenDetails:
    """What the tokens of the call's prompts are."""
    details: TokenDetails = {"cached_tokens": sum(map(_CACHED, outputs))}
    if image_tokens := sum(map(_IMAGES, outputs)):
        details["image_tokens"] = image_tokens
    if audio_tokens := sum(map(_SOUNDS, outputs)):
        details["audio_tokens"] = audio_tokens
    return details


class StreamUsage:
    """Token usage as the chunks of one call's stream report it."""

    def __init__(self, *, at_end: bool, in_chunks: bool, num_prompt_tokens: int) -> None:
        """
        Args:
            at_end: whether the stream ends with a separate usage chunk; the other chunks then have null.
            in_chunks: whether each chunk has the call's usage so far.
        """
        self.at_end = at_end
        self.in_chunks = in_chunks
        self._prompt = num_prompt_tokens
        self._completion = 0

    def count(self, delta: CompletionDelta) -> None:
        """Add the tokens of a delta to those so far, which only usage in chunks needs."""
        self._completion += len(delta.token_ids)

    def put_into(self, chunk: ChatCompletionChunk | Completion) -> None:
        """Add `usage` to a chunk with choices, if requested."""
        if self.in_chunks:
            chunk["usage"] = {
                "prompt_tokens": self._prompt,
                "completion_tokens": self._completion,
                "total_tokens": self._prompt + self._completion,
            }
        elif self.at_end:
            chunk["usage"] = None


def finished_by(answer: CompletionOutput | CompletionDelta) -> FinishedBy | None:
    """OpenAI's finish reason; None while the answer continues."""
    if answer.finish_reason is None:
        return None
    if answer.finish_reason is FinishReason.ABORT:
        return "abort"
    return "length" if answer.finish_reason is FinishReason.LENGTH else "stop"


def _end_of_chat(answer: CompletionOutput | CompletionDelta, calls: int) -> ChatFinishedBy | None:
    reason = finished_by(answer)
    by_stop_string = isinstance(answer.stop_reason, str)  # perhaps in the middle of a call
    return "tool_calls" if reason == "stop" and calls and not by_stop_string else reason


class Chunks:
    """Base of both kinds of streams: no opening event, a marked end, and failures as events."""

    frame = Frame.SERVER_SENT_EVENTS

    def begin_stream(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return COMMENT

    def fail_stream(self, reply: ErrorReply) -> bytes:
        return event(shape(reply)[1])

    def headers(self, outputs: Sequence[RequestOutput] | None) -> Mapping[str, str]:
        return {}


@dataclass(slots=True)
class _Sent:
    """The part of one answer that a stream has sent."""

    calls: int = 0
    separators: PieceSeparators = field(default_factory=PieceSeparators)


class ChatAnswer(Chunks):
    """`chat.completion` and its chunks."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        parsers: Parsers,
        stream_usage: StreamUsage,
        *,
        show_reasoning: bool = True,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._parsers = parsers
        self._show_reasoning = show_reasoning
        self._stream_usage = stream_usage
        self._sent: dict[int, _Sent] = {}  # by the answer's index
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by index: an event of text, before and after the text

    def stream_delta(self, position: int, delta: CompletionDelta) -> bytes:
        index = delta.index
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        chunks = []
        # OpenAI's first chunk has the role, and no text.
        if index not in self._sent:
            self._sent[index] = _Sent()
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}, None, None))
        if self._stream_usage.in_chunks:
            self._stream_usage.count(delta)
        pieces = self._parsers.feed_text(delta)
        if len(pieces) == 1 and isinstance(pieces[0], Text) and not (chunks or logprobs or delta.finish_reason):
            return self._text_event(index, self._sent[index].separators.before(pieces[0]) + pieces[0].text)
        shown = [(piece, self._delta(index, piece)) for piece in pieces]
        deltas = [piece_delta for piece, piece_delta in shown if self._shows(piece)]
        # Log-probabilities of tokens without text, such as half a character, still have to be sent.
        for piece_delta in deltas or ([{"content": ""}] if logprobs else []):
            chunks.append(self._chunk(index, piece_delta, logprobs, None))
            logprobs = None
        reason = _end_of_chat(delta, self._sent[index].calls)
        if reason is not None:
            chunks.append(self._chunk(index, {}, None, reason))
        return b"".join(map(event, chunks))

    def _text_event(self, index: int, text: str) -> bytes:
        """The event of a chunk that has text alone, as most have: it is encoded once, and then only its text."""
        if self._stream_usage.in_chunks:
            return event(self._chunk(index, {"content": text}, None, None))
        if index not in self._frames:
            whole = event(self._chunk(index, {"content": _SLOT}, None, None))
            before, _, after = whole.rpartition(encode(_SLOT))
            self._frames[index] = before, after
        before, after = self._frames[index]
        return before + encode(text) + after

    def _shows(self, part: Piece | Part) -> bool:
        return self._show_reasoning or not isinstance(part, Reasoning)

    def _delta(self, index: int, piece: Piece) -> Delta:
        sent = self._sent[index]
        separator = sent.separators.before(piece)
        if isinstance(piece, Text):
            return {"content": separator + piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": separator + piece.text}
        if isinstance(piece, CallArguments):
            return {"tool_calls": [{"index": sent.calls - 1, "function": {"arguments": piece.text}}]}
        call_index = sent.calls
        sent.calls += 1
        id, function = call_id(self._head.id, index, call_index), FunctionDelta(name=piece.name, arguments="")
        return {"tool_calls": [{"index": call_index, "id": id, "type": "function", "function": function}]}

    def _chunk(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None, reason: ChatFinishedBy | None
    ) -> ChatCompletionChunk:
        chunk = self._empty_chunk()
        chunk["choices"].append({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})
        self._stream_usage.put_into(chunk)
        return chunk

    def _empty_chunk(self) -> ChatCompletionChunk:
        head = self._head
        return {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "choices": [],
        }

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        if not self._stream_usage.at_end:
            return DONE
        return event({**self._empty_chunk(), "usage": self._usage(outputs)}) + DONE

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        reasoning = sum(self._parsers.reasoning_tokens(answer) for output in outputs for answer in output.outputs)
        return {**usage_of(outputs), "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def complete_body(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        head = self._head
        made: ChatCompletion = {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._choice(answer) for output in outputs for answer in output.outputs],
            "usage": self._usage(outputs),
        }
        (output,) = outputs
        if output.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_logprobs)
        return made

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        parts = [part for part in self._parsers.parts(answer) if self._shows(part)]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        reason = _end_of_chat(answer, len(calls))
        assert reason is not None, "a whole answer has ended"
        return {
            "index": answer.index,
            "message": self._message(answer.index, parts, calls),
            "logprobs": None if answer.logprobs is None else self._logprobs(answer.logprobs),
            "finish_reason": reason,
        }

    def _message(self, index: int, parts: Sequence[Part], calls: Sequence[ToolCall]) -> AnswerMessage:
        text = BETWEEN_PARTS.join(part.text for part in parts if isinstance(part, Text))
        message: AnswerMessage = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning := BETWEEN_PARTS.join(part.text for part in parts if isinstance(part, Reasoning)):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": call_id(self._head.id, index, call_index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call_index, call in enumerate(calls)
            ]
        return message

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        return {"content": chat_logprobs(self._tokenizer, entries), "refusal": None}


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
    """Tokens with their log-probabilities and the top alternatives at each position, for chats and responses."""
    return [
        {
            **top_logprob(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [top_logprob(tokenizer, *alternative) for alternative in entry.top],
        }
        for entry in entries
    ]


def top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    """A token with its log-probability."""
    raw = tokenizer.token_bytes(token_id)
    return {"token": show_token(raw), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


def prompt_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Log-probabilities of a prompt's tokens as vLLM has them."""
    return [None if entry is None else _prompt_row(tokenizer, entry) for entry in entries]


def _prompt_row(tokenizer: Tokenizer | None, entry: TokenLogprob) -> dict[str, PromptToken]:
    row: dict[str, PromptToken] = {}
    for rank, (token_id, logprob) in enumerate((*entry.top, (entry.token_id, entry.logprob)), 1):
        text = str(token_id) if tokenizer is None else tokenizer.token_text(token_id)
        known = rank if rank <= len(entry.top) else None
        shown: PromptToken = {"logprob": max(logprob, LEAST_LOGPROB), "rank": known, "decoded_token": text}
        row.setdefault(str(token_id), shown)
    return row


def show_token(raw: bytes) -> str:
    """A token as text; one that is part of a character as OpenAI writes it, `bytes:\\xf0\\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
