"""Assembles one request's outputs as they arrive: text and token deltas for a stream, and the result so far.

    token ids ──Detokenizer──> whole characters ──StopStrings──> text that cannot be part of a stop string ──> delta

Detokenizer and StopStrings keep state of bounded size and process each token and each character once: the cost of a
token does not depend on the length of the text.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from penstock.api.request import (
    CompletionOutput,
    ErrorReason,
    FinishReason,
    Image,
    PromptPart,
    Request,
    RequestOutput,
    RequestTimes,
    Resumed,
    SequenceOutput,
    TokenLogprob,
)
from penstock.api.sampling_params import SamplingParams
from penstock.dataclass import dataclass
from penstock.text.tokenizer import Tokenizer


class Detokenizer:
    """Detokenizes one sequence incrementally: whole characters only, special tokens other than `shown` left out.

    The concatenated pieces equal `decode(prompt + answer)` without its prefix `decode(prompt)`; invalid UTF-8 becomes
    U+FFFD.

    There are two kinds of tokens. Byte tokens (all tokens of a byte-level BPE; the byte fallback of others) go through
    an incremental UTF-8 decoder. The text of other tokens may depend on the previous token, for example whether it
    begins with a space: it is the difference between decoding both tokens and decoding the previous one.

    `tokenizers.decoders.DecodeStream` is unsuitable: on invalid UTF-8 its cost grows with each token, and it raises on
    an invalid byte fallback after a whole character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        shown: Sequence[int] = (),
        *,
        keeps_first_space: bool = False,
    ) -> None:
        """
        Args:
            keeps_first_space: some tokenizers' `decode` removes a space at the beginning of the text. A structured
                answer keeps it: the grammar counts each character of its tokens.
        """
        self._tokenizer = tokenizer
        self._shown = shown
        self._keeps_first_space = keeps_first_space
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The text has no special tokens, so they do not decide whether a space comes before the next token.
        visible = (token for token in reversed(prompt_token_ids) if tokenizer.is_shown(token))
        self._before = next(visible, None)  # the answer's first token is decoded after it
        self._has_bytes = False  # whether a character may be incomplete

    def add_token(self, token_id: int) -> str:
        """The text completed by this token; may be empty."""
        if not self._tokenizer.is_shown(token_id):
            return self.flush() + self._tokenizer.token_text(token_id) if token_id in self._shown else ""
        raw = self._tokenizer.raw_bytes(token_id)
        if raw is None:
            text = (self.flush() if self._has_bytes else "") + self._added_text(token_id)
        else:
            text, self._has_bytes = self._characters.decode(raw), True
        self._before = token_id
        return text

    def flush(self) -> str:
        """U+FFFD at the end, if a character is incomplete."""
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        self._has_bytes = False
        return text

    def _added_text(self, token_id: int) -> str:
        if self._before is None:
            return (
                self._tokenizer.token_text(token_id) if self._keeps_first_space else self._tokenizer.decode([token_id])
            )
        before = self._tokenizer.decode_alone(self._before)
        return self._tokenizer.decode([self._before, token_id])[len(before) :]


class Released(NamedTuple):
    """Text that may be sent, and the stop string that ended it, if any."""

    text: str
    stop: str | None


class StopTable:
    """The stop strings of a request, longest first, with their Knuth-Morris-Pratt failure functions.

    All its answers share it. A failure function is computed only as far as an answer has matched its string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = sorted(strings, key=len, reverse=True)
        self.first = frozenset(text[0] for text in strings)
        """Characters that the strings begin with."""
        self._fallbacks = [[0, 0] for _ in self.strings]

    def fallback(self, index: int, count: int) -> int:
        """Length of the longest proper prefix of the first `count` characters of a string that also ends them."""
        text, known = self.strings[index], self._fallbacks[index]
        while len(known) <= count:
            character, length = text[len(known) - 1], known[-1]
            while length and text[length] != character:
                length = known[length]
            known.append(length + (text[length] == character))
        return known[count]


class StopStrings:
    """Searches a streamed text for stop strings, independent of how it is split into pieces.

    The stop string that is complete first ends the text; among those complete at the same character, the longest. The
    text is cut before the stop string. Text that may be the beginning of a stop string is held back until it is
    decided.

    The search is the Knuth-Morris-Pratt algorithm (1977), for all strings in parallel.
    """

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._matched = [0] * len(table.strings)  # per string: length of its longest prefix that ends the text
        self._held = ""

    def add_text(self, text: str, may_stop: bool = True) -> Released:
        """Process the next piece of text; with `may_stop` False, a complete stop string is treated as ordinary text."""
        # Nearly every piece: no character of it begins a stop string.
        if not self._held and self._table.first.isdisjoint(text):
            return Released(text, None)
        seen = self._held + text
        for place in range(len(self._held), len(seen)):
            stop = self._match(seen[place])
            if stop is not None and may_stop:
                self._held = ""
                return Released(seen[: place + 1 - len(stop)], stop)
        # The longest match of any string: what may yet be a stop string cannot be taken back once it is sent.
        keep = len(seen) - max(self._matched)
        self._held = seen[keep:]
        return Released(seen[:keep], None)

    def flush(self) -> str:
        """The text held back, at the end."""
        text, self._held = self._held, ""
        return text

    def _match(self, character: str) -> str | None:
        """Process one character; returns the longest string that it completes, or None."""
        complete = None
        for i, text in enumerate(self._table.strings):
            count = self._matched[i]
            while count and text[count] != character:
                count = self._table.fallback(i, count)
            count += text[count] == character
            if count == len(text):
                complete = complete or text
                count = self._table.fallback(i, count)
            self._matched[i] = count
        return complete


@dataclass(slots=True)
class CompletionDelta:
    """New tokens and text of one of a request's answers. Text may come later than its tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_reason: ErrorReason | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the next prompt tokens, from the second on; if requested, all come before the answer."""
    engine_goes_on: bool = False
    """A stop string has ended the answer, which the engine does not know: it needs a `Finish`."""


class OutputProcessor:
    """Turns a request's `SequenceOutput`s into text.

    Each of its sequences ends once; later engine outputs for it are dropped. A stop string ends a sequence here while
    the engine continues (`CompletionDelta.engine_goes_on`).
    """

    def __init__(
        self, request: Request, params: SamplingParams, tokenizer: Tokenizer | None, prompt: str | None
    ) -> None:
        """
        Args:
            params: as the caller gave them, for the stop strings.
            tokenizer: None if the model has none: there is then no text.
            prompt: the prompt's text, if it was given as text.
        """
        self.request = request
        self.arithmetic = ""
        """Fingerprint of the engine's arithmetic (`runner/fingerprint.py`), once there are tokens."""
        self._params = params
        self._prompt = prompt
        stops = StopTable(params.stop) if params.stop else None
        self._answers = [ChoiceState(i, request, params, tokenizer, stops) for i in range(request.params.n)]
        self._unfinished = len(self._answers)
        self.finished = False
        """Whether each of the request's sequences has ended."""
        self._times = RequestTimes(arrival=request.arrival)
        self._num_cached_tokens = 0
        self._vector: bytes | None = None
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of each sequence so far."""
        return [answer.token_ids for answer in self._answers]

    def process_output(self, output: SequenceOutput, now: float) -> CompletionDelta | None:
        """Process an engine output; returns None if its sequence has already ended.

        Args:
            now: seconds of `time.monotonic()`.
        """
        answer = self._answers[output.index]
        # A stop string ended it here, and the engine's step with further tokens was under way.
        if answer.finish_reason is not None:
            return None
        times = self._times
        self._vector = output.vector
        if output.first_scheduled is not None and times.first_scheduled is None:
            times.first_scheduled, self._num_cached_tokens = output.first_scheduled, output.num_cached_tokens
        if output.token_ids and times.first_token is None:
            times.first_token = now
        delta = answer.add_output(output)
        if output.prompt is not None:
            delta.prompt_logprobs = self._take_prompt(output.prompt)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self.finished = self._unfinished == 0
            times.finished = now if self.finished else None
        return delta

    def _take_prompt(self, part: PromptPart) -> list[TokenLogprob]:
        """The new log-probabilities: an engine that replays a request sends all of them again."""
        known = self._prompt_logprobs
        assert known is not None, "the prompt's log-probabilities were not asked for"
        assert part.start <= len(known), "a part of the prompt is missing"
        new = part.logprobs[len(known) - part.start :]
        known += new
        return new

    def resume_point(self) -> Resumed:
        """The tokens so far, from which an engine resumes the request."""
        points = tuple(
            None if answer.finish_reason is not None else tuple(answer.token_ids) for answer in self._answers
        )
        return points if any(points) or None in points else ()

    def result(self) -> RequestOutput:
        """The outputs so far."""
        images, answers = self.request.images, self._answers if self._params.best_of is None else self._best()
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[answer.so_far(place) for place, answer in enumerate(answers)],
            finished=self.finished,
            times=self._times,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_generated_tokens=sum(len(answer.token_ids) for answer in self._answers),
            num_image_tokens=_num_features(images, is_sound=False) if images else 0,
            num_audio_tokens=_num_features(images, is_sound=True) if images else 0,
            vector=self._vector,
        )

    def _best(self) -> "list[ChoiceState]":
        """The best answers; failed answers come first, so that they are not overlooked."""
        return sorted(self._answers, key=ChoiceState.rank)[: self._params.n]


def _num_features(images: Sequence[Image], *, is_sound: bool) -> int:
    return sum(image.rows * image.columns for image in images if image.is_sound is is_sound)


class ChoiceState:
    """One of a request's answers: its tokens and text so far, and its end."""

    def __init__(
        self,
        index: int,
        request: Request,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        stops: StopTable | None,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._min_tokens = request.params.min_tokens
        self._stop_token_ids = request.params.stop_token_ids
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            is_structured = params.structured is not None
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, params.shown_special_tokens, keeps_first_space=is_structured
            )
        self._stops = None if stops is None else StopStrings(stops)
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []
        self._shows_logprobs = params.logprobs is not None
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._error_reason: ErrorReason | None = None
        self._score: float | None = None

    def add_output(self, output: SequenceOutput) -> CompletionDelta:
        text, count = self._read(output.token_ids, output.finish_reason)
        delta = CompletionDelta(self._index, text, output.token_ids[:count], error=output.error)
        delta.error_reason = output.error_reason
        self._texts.append(text)
        if self._logprobs is not None and output.logprobs is not None:
            logprobs = output.logprobs[:count]
            self._logprobs += logprobs
            delta.logprobs = logprobs if self._shows_logprobs else None
        self._error, self._error_reason, self._score = output.error, output.error_reason, output.score
        delta.finish_reason, delta.stop_reason = self.finish_reason, self._stop_reason
        delta.engine_goes_on = self.finish_reason is not None and output.finish_reason is None
        return delta

    def rank(self) -> tuple[bool, float]:
        """Sort key, smaller for a better answer (a higher mean log-probability); smallest for a failed answer."""
        entries = self._logprobs or ()
        mean = sum(entry.logprob for entry in entries) / max(len(entries), 1)
        return self.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR), -mean

    def so_far(self, index: int) -> CompletionOutput:
        self._texts = ["".join(self._texts)]
        return CompletionOutput(
            index=index,
            text=self._texts[0],
            token_ids=list(self.token_ids),
            logprobs=list(self._logprobs) if self._logprobs is not None and self._shows_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
            error_reason=self._error_reason,
            score=self._score,
        )

    def _read(self, token_ids: Sequence[int], ending: FinishReason | None) -> tuple[str, int]:
        """Add tokens up to the one that completes a stop string; returns (their text, their number)."""
        shown = []
        # the engine stops at a stop token, the last one, which is not part of the text (or a grammar stops it)
        stopped = ending is FinishReason.STOP and bool(token_ids) and token_ids[-1] in self._stop_token_ids
        hidden = len(token_ids) - 1 if stopped else None
        for place, token in enumerate(token_ids):
            self.token_ids.append(token)
            if place == hidden:
                self._stop_reason = token
            elif self._detokenizer is not None:
                text = self._detokenizer.add_token(token)
                shown.append(text if self._stops is None else self._show(text, self._stops))
                if self.finish_reason is not None:
                    return "".join(shown), place + 1
        if ending is not None:
            shown.append(self._end(ending))
        return "".join(shown), len(token_ids)

    def _show(self, text: str, stops: StopStrings) -> str:
        """Release the text that cannot be part of a stop string; a complete stop string ends the answer."""
        released = stops.add_text(text, may_stop=len(self.token_ids) >= self._min_tokens)
        if released.stop is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, released.stop
        return released.text

    def _end(self, reason: FinishReason) -> str:
        """Release the text that was held back."""
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._stops is not None:
            rest = self._show(rest, self._stops) + self._stops.flush()
        if self.finish_reason is None:
            self.finish_reason = reason
        return rest
