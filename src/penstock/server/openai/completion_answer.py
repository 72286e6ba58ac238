"""Formats engine outputs as answers of `/v1/completions`, whole or as the chunks of a stream."""

import codecs
from collections.abc import Sequence
from dataclasses import field

from penstock.api.request import CompletionOutput, RequestOutput, TokenLogprob
from penstock.dataclass import dataclass
from penstock.frontend.output_processor import CompletionDelta
from penstock.server.logprobs import LEAST_LOGPROB
from penstock.server.openai.answers import (
    Chunks,
    Head,
    StreamUsage,
    finished_by,
    prompt_logprobs,
    show_token,
    usage_of,
)
from penstock.server.openai.schema import Completion, CompletionChoice, LegacyLogprobs
from penstock.server.streams import DONE, event
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is echoed before its answers."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Shown:
    """The requested contents of a call's answers."""

    n: int
    """Answers per prompt."""
    usage: StreamUsage
    echoed: Sequence[Echo] | None
    """For `echo`, each prompt."""
    echoes_logprobs: bool
    """Whether the echoed prompts have log-probabilities."""


class CompletionAnswer(Chunks):
    """`text_completion`, whole or in chunks."""

    def __init__(self, head: Head, tokenizer: Tokenizer | None, shown: Shown) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._shown = shown
        self._prompts: dict[int, _Table] = {}  # with what was sent so far, by position in the call
        self._tables: dict[int, _Table] = {}

    def stream_delta(self, position: int, delta: CompletionDelta) -> bytes:
        index = position * self._shown.n + delta.index
        if delta.prompt_logprobs:
            self._prompt_table(position).add(delta.prompt_logprobs)
        if self._shown.usage.in_chunks:
            self._shown.usage.count(delta)
        reason = finished_by(delta)
        text = delta.text
        if not (text or delta.logprobs or delta.token_ids or reason):
            return b""
        if index not in self._tables:
            self._tables[index] = self._begin(position)
            text = self._echo(position) + text
        table = self._tables[index]
        table.add(delta.logprobs or ())
        logprobs = table.take() if table else None
        if not (text or logprobs or reason):
            return b""
        chunk = self._completion([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])
        self._shown.usage.put_into(chunk)
        return event(chunk)

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        if not self._shown.usage.at_end:
            return DONE
        return event({**self._completion([]), "usage": usage_of(outputs)}) + DONE

    def complete_body(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._choice(position, answer, output)
            for position, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return {**self._completion(choices), "usage": usage_of(outputs)}

    def _choice(self, position: int, answer: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        reason = finished_by(answer)
        assert reason is not None, "a whole answer has ended"
        choice: CompletionChoice = {
            "index": position * self._shown.n + answer.index,
            "text": self._echo(position) + answer.text,
            "logprobs": None if answer.logprobs is None else self._columns(position, answer.logprobs, output),
            "finish_reason": reason,
        }
        if output.prompt_logprobs is not None and not self._shown.echoes_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_logprobs)
        return choice

    def _columns(self, position: int, entries: Sequence[TokenLogprob], output: RequestOutput) -> LegacyLogprobs:
        if self._shown.echoes_logprobs and position not in self._prompts:
            of_prompt = [entry for entry in output.prompt_logprobs or () if entry is not None]
            self._prompt_table(position).add(of_prompt)
        table = self._begin(position)
        table.add(entries)
        return table.take()

    def _prompt_table(self, position: int) -> "_Table":
        if position not in self._prompts:
            self._prompts[position] = _Table(self._tokenizer)
            if self._shown.echoed is not None:
                self._prompts[position].add_first(self._shown.echoed[position].token_ids[0])
        return self._prompts[position]

    def _begin(self, position: int) -> "_Table":
        """The table of an answer, with the rows of an echoed prompt."""
        return self._prompt_table(position).copy() if self._shown.echoes_logprobs else _Table(self._tokenizer)

    def _echo(self, position: int) -> str:
        return "" if self._shown.echoed is None else self._shown.echoed[position].text

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        head = self._head
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


@dataclass(slots=True)
class _Table:
    """Log-probabilities as columns; `text_offset` counts characters, also where a character spans tokens."""

    tokenizer: Tokenizer | None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[dict[str, float] | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    offset: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=_decoder)

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def copy(self) -> "_Table":
        """A copy that continues from here independently."""
        decoder = _decoder()
        decoder.setstate(self.decoder.getstate())
        columns = (self.tokens[:], self.logprobs[:], self.tops[:], self.offsets[:])
        return _Table(self.tokenizer, *columns, self.offset, decoder)

    def add_first(self, token_id: int) -> None:
        """Add the first token of a prompt, which has no log-probability."""
        self._add(token_id, None, None)

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        for entry in entries:
            self._add(entry.token_id, max(entry.logprob, LEAST_LOGPROB), self._top(entry) if entry.top else None)

    def _add(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        raw = self._bytes(token_id)
        self.tokens.append(show_token(raw))
        self.logprobs.append(logprob)
        self.tops.append(top)
        self.offsets.append(self._advance(raw))

    def take(self) -> LegacyLogprobs:
        """Return the rows added since the last call."""
        table: LegacyLogprobs = {
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.tops if any(self.tops) else None,
            "text_offset": self.offsets,
        }
        self.tokens, self.logprobs, self.tops, self.offsets = [], [], [], []
        return table

    def _advance(self, raw: bytes) -> int:
        """Offset in the text of a token's first character, which earlier tokens may share."""
        pending, _ = self.decoder.getstate()
        continues = raw[:1] and raw[0] & 0xC0 == 0x80
        start = self.offset + (1 if pending and not continues else 0)  # what was cut short shows as one U+FFFD
        self.offset += len(self.decoder.decode(raw))
        return start

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The top tokens and the chosen one; of tokens with the same text, the more likely."""
        shown: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            shown.setdefault(show_token(self._bytes(token_id)), max(logprob, LEAST_LOGPROB))
        return shown

    def _bytes(self, token_id: int) -> bytes:
        return str(token_id).encode() if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
