"""Formats engine outputs as TGI's answers: whole, or one event per token."""

import time
from collections.abc import Mapping, Sequence

from penstock.api.request import CompletionOutput, FinishReason, RequestOutput, TokenLogprob
from penstock.dataclass import dataclass
from penstock.frontend.output_processor import CompletionDelta, Detokenizer
from penstock.server.errors import ErrorReply
from penstock.server.huggingface_errors import INCOMPLETE, shape
from penstock.server.logprobs import LEAST_LOGPROB
from penstock.server.streams import COMMENT, Frame, event
from penstock.server.tgi.schema import (
    BestOfSequence,
    Details,
    FinishedBy,
    Generated,
    PrefillToken,
    StreamDetails,
    StreamEvent,
    Token,
)
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    """Request parameters on which the answer's format depends."""

    inputs: str
    token_ids: Sequence[int]
    full_text: bool
    """Whether the text begins with the prompt (`return_full_text`)."""
    details: bool
    seed: int | None
    """None for greedy decoding."""
    is_structured: bool
    """Whether a grammar constrains the answer."""
    top_tokens: bool
    received: float
    """Seconds of `time.monotonic()`."""
    accepted: float
    device: str


class GenerateAnswer:
    """One generation. `as_list`: the answer is wrapped in a list, as for `POST /`."""

    frame = Frame.SERVER_SENT_EVENTS

    def __init__(self, question: Question, tokenizer: Tokenizer, *, as_list: bool = False) -> None:
        self._question = question
        self._tokenizer = tokenizer
        self._as_list = as_list
        self._tokens = _Tokens(tokenizer, question)  # of the stream
        self._texts = [question.inputs] if question.full_text else []
        self._count = 0

    def begin_stream(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return COMMENT

    def stream_delta(self, position: int, delta: CompletionDelta) -> bytes:
        if delta.finish_reason is FinishReason.ABORT:
            return event({"error": delta.error or "the request was aborted", "error_type": INCOMPLETE})
        self._texts.append(delta.text)
        events = [self._event(entry) for entry in delta.logprobs or ()]
        if delta.finish_reason is not None:
            assert events, "an answer ends with a token"
            self._texts.append(_stop_string(delta))
            events[-1]["token"]["text"] += self._tokens.rest()
            events[-1]["generated_text"] = "".join(self._texts)
            events[-1]["details"] = self._stream_details(delta) if self._question.details else None
        return b"".join(map(event, events))

    def _event(self, entry: TokenLogprob) -> StreamEvent:
        self._count += 1
        token = self._tokens.next(entry)
        made: StreamEvent = {"index": self._count, "token": token, "generated_text": None, "details": None}
        if self._question.top_tokens:
            made["top_tokens"] = self._tokens.top(entry)
        return made

    def _stream_details(self, delta: CompletionDelta) -> StreamDetails:
        return {
            "finish_reason": _finished_by(delta),
            "generated_tokens": self._count,
            "seed": self._question.seed,
            "input_length": len(self._question.token_ids),
        }

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        return b""

    def fail_stream(self, reply: ErrorReply) -> bytes:
        return event(shape(reply)[1])

    def complete_body(self, outputs: Sequence[RequestOutput]) -> Generated | list[Generated]:
        (output,) = outputs
        best, *others = output.outputs
        prefill = self._prefill(output)
        made: Generated = {"generated_text": self._text(best)}
        if self._question.details:
            details: Details = {
                "finish_reason": _finished_by(best),
                "generated_tokens": len(best.token_ids),
                "seed": self._question.seed,
                "prefill": prefill,
                "tokens": self._tokens_of(best),
            }
            if self._question.top_tokens:
                details["top_tokens"] = self._top_tokens_of(best)
            if others:
                details["best_of_sequences"] = [self._other(answer, prefill) for answer in others]
            made["details"] = details
        return [made] if self._as_list else made

    def _prefill(self, output: RequestOutput) -> list[PrefillToken]:
        """The prompt's tokens, if requested."""
        if output.prompt_logprobs is None:
            return []
        return [
            {
                "id": token_id,
                "text": self._tokenizer.token_text(token_id),
                "logprob": None if entry is None else max(entry.logprob, LEAST_LOGPROB),
            }
            for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        ]

    def _other(self, answer: CompletionOutput, prefill: list[PrefillToken]) -> BestOfSequence:
        made: BestOfSequence = {
            "generated_text": self._text(answer),
            "finish_reason": _finished_by(answer),
            "generated_tokens": len(answer.token_ids),
            "seed": self._question.seed,
            "prefill": prefill,
            "tokens": self._tokens_of(answer),
        }
        if self._question.top_tokens:
            made["top_tokens"] = self._top_tokens_of(answer)
        return made

    def _text(self, answer: CompletionOutput) -> str:
        return (self._question.inputs if self._question.full_text else "") + answer.text + _stop_string(answer)

    def _tokens_of(self, answer: CompletionOutput) -> list[Token]:
        texts = _Tokens(self._tokenizer, self._question)
        tokens = [texts.next(entry) for entry in answer.logprobs or ()]
        tokens[-1]["text"] += texts.rest()
        return tokens

    def _top_tokens_of(self, answer: CompletionOutput) -> list[list[Token]]:
        return [self._tokens.top(entry) for entry in answer.logprobs or ()]

    def headers(self, outputs: Sequence[RequestOutput] | None) -> Mapping[str, str]:
        question = self._question
        headers_of_call = {"x-compute-type": question.device, "x-compute-characters": str(len(question.inputs))}
        if outputs is None:
            return headers_of_call
        now, times = time.monotonic(), outputs[0].times
        started = now if times.first_scheduled is None else times.first_scheduled
        count = sum(len(answer.token_ids) for answer in outputs[0].outputs)
        return headers_of_call | {
            "x-compute-time": f"{now - question.received:.6f}",
            "x-total-time": _milliseconds(now - question.received),
            "x-validation-time": _milliseconds(question.accepted - question.received),
            "x-queue-time": _milliseconds(started - question.accepted),
            "x-inference-time": _milliseconds(now - started),
            "x-time-per-token": _milliseconds((now - started) / max(count, 1)),
            "x-prompt-tokens": str(len(question.token_ids)),
            "x-generated-tokens": str(count),
        }


class _Tokens:
    """Formats a sequence's tokens in order, with texts that concatenate to the sequence's text."""

    def __init__(self, tokenizer: Tokenizer, question: Question) -> None:
        self._tokenizer = tokenizer
        self._texts = Detokenizer(tokenizer, question.token_ids, keeps_first_space=question.is_structured)

    def next(self, entry: TokenLogprob) -> Token:
        special = not self._tokenizer.is_shown(entry.token_id)
        text = self._tokenizer.token_text(entry.token_id) if special else self._texts.add_token(entry.token_id)
        return {"id": entry.token_id, "text": text, "logprob": max(entry.logprob, LEAST_LOGPROB), "special": special}

    def rest(self) -> str:
        """U+FFFD if the last token left a character incomplete, otherwise empty."""
        return self._texts.flush()

    def top(self, entry: TokenLogprob) -> list[Token]:
        """The most likely tokens at a token's position, each decoded by itself."""
        return [
            {
                "id": token_id,
                "text": self._tokenizer.token_text(token_id),
                "logprob": max(logprob, LEAST_LOGPROB),
                "special": not self._tokenizer.is_shown(token_id),
            }
            for token_id, logprob in entry.top
        ]


def _stop_string(answer: CompletionOutput | CompletionDelta) -> str:
    """The stop string that ended the answer, which TGI keeps in the text; "" if none did."""
    return answer.stop_reason if isinstance(answer.stop_reason, str) else ""


def _finished_by(answer: CompletionOutput | CompletionDelta) -> FinishedBy:
    if answer.finish_reason is FinishReason.LENGTH:
        return "length"
    return "stop_sequence" if isinstance(answer.stop_reason, str) else "eos_token"


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * max(seconds, 0.0)))
