"""One request's outputs, put together as they come: text and tokens for a stream, and the whole at any time."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.frontend.detokenizer import Detokenizer, StopStrings
from penstock.request import (
    CompletionOutput,
    FinishReason,
    PromptPart,
    Request,
    RequestOutput,
    RequestTimes,
    Resumed,
    SequenceOutput,
    TokenLogprob,
)
from penstock.sampling_params import SamplingParams
from penstock.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionDelta:
    """What one engine output added to one of a request's answers. Text may come later than its tokens, never sooner."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of the prompt's next tokens, from its second on; if asked for, all come before the first token."""
    engine_goes_on: bool = False
    """A stop string has ended the answer here; the engine, which knows of none, must be told to finish it."""


class OutputProcessor:
    """Makes of a request's `SequenceOutput`s the text that its reader sees.

    Each of its sequences ends once; what the engine still sends for it is dropped. A stop string ends a sequence here
    while the engine goes on (`CompletionDelta.engine_goes_on`).
    """

    def __init__(
        self, request: Request, params: SamplingParams, tokenizer: Tokenizer | None, prompt: str | None
    ) -> None:
        """
        Args:
            params: as the caller gave them, for the stop strings.
            tokenizer: None if the model has none: there is no text then.
            prompt: the prompt's text, if it came as text.
        """
        self.request = request
        self._params = params
        self._prompt = prompt
        self._answers = [ChoiceState(i, request, params, tokenizer) for i in range(request.params.n)]
        self._unfinished = len(self._answers)
        self._times = RequestTimes(arrival=request.arrival)
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        """Whether each of the request's sequences has ended."""
        return self._unfinished == 0

    def process_output(self, output: SequenceOutput, now: float) -> CompletionDelta | None:
        """Take an output of the engine; None if its sequence has ended before.

        Args:
            now: seconds of `time.monotonic()`.
        """
        answer = self._answers[output.index]
        if answer.finish_reason is not None:
            return None
        times = self._times
        if output.first_scheduled is not None and times.first_scheduled is None:
            times.first_scheduled, self._num_cached_tokens = output.first_scheduled, output.num_cached_tokens
        if output.token_ids and times.first_token is None:
            times.first_token = now
        delta = answer.add_output(output)
        if output.prompt is not None:
            delta.prompt_logprobs = self._take_prompt(output.prompt)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            times.finished = now if self.finished else None
        return delta

    def _take_prompt(self, part: PromptPart) -> list[TokenLogprob]:
        """What is new of it: an engine that begins anew tells all again."""
        known = self._prompt_logprobs
        assert known is not None, "nobody asked for the prompt's log-probabilities"
        assert part.start <= len(known), "a part of the prompt is missing"
        new = part.logprobs[len(known) - part.start :]
        known += new
        return new

    def resume_point(self) -> Resumed:
        """What an engine must know to go on from here, besides the request."""
        points = tuple(
            None if answer.finish_reason is not None else tuple(answer.token_ids) for answer in self._answers
        )
        return points if any(points) or None in points else ()

    def result(self) -> RequestOutput:
        """All that came so far; after the end, all there is."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[answer.so_far(place) for place, answer in enumerate(self._shown())],
            finished=self.finished,
            times=self._times,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_generated_tokens=sum(len(answer.token_ids) for answer in self._answers),
        )

    def _shown(self) -> "list[ChoiceState]":
        """All answers, or the best of them; one that failed comes first, so that it is not overlooked."""
        if self._params.best_of is None:
            return self._answers
        return sorted(self._answers, key=ChoiceState.rank)[: self._params.n]


class ChoiceState:
    """One of a request's choices: its tokens and text so far, and how it ended."""

    def __init__(self, index: int, request: Request, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._min_tokens = params.min_tokens
        self._stop_token_ids = request.params.stop_token_ids
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            has_form = params.structured is not None
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, params.shown_special_tokens, keeps_first_space=has_form
            )
        self._stops = StopStrings(params.stop)
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []
        self._shows_logprobs = params.logprobs is not None
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._score: float | None = None

    def add_output(self, output: SequenceOutput) -> CompletionDelta:
        text, count = self._read(output.token_ids, output.finish_reason)
        delta = CompletionDelta(self._index, text, output.token_ids[:count], error=output.error)
        self._texts.append(text)
        if self._logprobs is not None and output.logprobs is not None:
            told = output.logprobs[:count]
            self._logprobs += told
            delta.logprobs = told if self._shows_logprobs else None
        self._error, self._score = output.error, output.score
        delta.finish_reason, delta.stop_reason = self.finish_reason, self._stop_reason
        delta.engine_goes_on = self.finish_reason is not None and output.finish_reason is None
        return delta

    def rank(self) -> tuple[bool, float]:
        """Smaller for a better answer: one with a higher mean log-probability. The smallest for one that failed."""
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
            score=self._score,
        )

    def _read(self, token_ids: Sequence[int], ending: FinishReason | None) -> tuple[str, int]:
        """Add tokens up to the one that completes a stop string: (their text, how many)."""
        shown = []
        # what stops the engine is a stop token, the last one: it ends the text and is no part of it (or a grammar does)
        stopped = ending is FinishReason.STOP and bool(token_ids) and token_ids[-1] in self._stop_token_ids
        hidden = len(token_ids) - 1 if stopped else None
        for place, token in enumerate(token_ids):
            self.token_ids.append(token)
            if place == hidden:
                self._stop_reason = token
            elif self._detokenizer is not None:
                shown.append(self._show(self._detokenizer.add_token(token)))
                if self.finish_reason is not None:
                    return "".join(shown), place + 1
        if ending is not None:
            shown.append(self._end(ending))
        return "".join(shown), len(token_ids)

    def _show(self, text: str) -> str:
        """The part of the text that no stop string can claim; one that is complete ends the answer."""
        released = self._stops.add_text(text, may_stop=len(self.token_ids) >= self._min_tokens)
        if released.stop is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, released.stop
        return released.text

    def _end(self, reason: FinishReason) -> str:
        """The text that was held back."""
        rest = "" if self._detokenizer is None else self._show(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
        return rest + self._stops.flush()
