"""Beam search: selects the beams that survive each step, like `transformers.generate(num_beams=...)`.

A step gives each beam its most likely next tokens. When all beams have theirs, all continuations are compared:

    collect(beam, candidates) ... ──> advance() ──> [Branch, ...] best first: parent beam and token
                                          └───────> [] at the end: `hypotheses`

A branch names the sequence that will hold it. The first branch of each parent stays in the parent's sequence, so its
blocks are not copied; the others take the sequences of discarded beams. Ties are broken by the rank of the parent beam,
then by the lower token id.

Reference: `GenerationMixin._beam_search` of transformers 5. It compares in float32, this in float64; scores agree to
float32 precision.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from penstock.api.request import FinishReason, SequenceOutput, TokenLogprob
from penstock.api.sampling_params import Beams, ResolvedParams
from penstock.dataclass import dataclass

TOO_FEW = "the model gives no other continuation a probability above 0: there are fewer answers than were asked for"


class Trail(NamedTuple):
    """A beam's tokens as a linked list, newest first; beams with a common origin share the older tokens."""

    entry: TokenLogprob
    before: "Trail | None"


@dataclass(slots=True)
class _Beam:
    """A live hypothesis."""

    index: int
    """Index of its sequence."""
    score: float
    """Sum of its tokens' log-probabilities."""
    trail: Trail | None = None
    candidates: TokenLogprob | None = None
    """Its most likely next tokens, once a step has computed them."""


class Branch(NamedTuple):
    """A surviving continuation: sequence `child` becomes `parent` plus one token."""

    child: int
    parent: int
    token: int


class _Continuation(NamedTuple):
    score: float
    beam: _Beam
    token: int
    logprob: float


@dataclass(slots=True)
class _Hypothesis:
    score: float
    trail: Trail
    reason: FinishReason


class BeamSearch:
    """The beams and finished hypotheses of one request."""

    def __init__(self, params: ResolvedParams) -> None:
        assert params.beams is not None, "the request asks for no beam search"
        self._params = params
        self._beams: Beams = params.beams
        self._stop_ids = frozenset(params.stop_token_ids)
        # At most as many of a beam's continuations survive as there are beams, and stop tokens never do.
        count = max(params.beams.num_beams + len(self._stop_ids), params.logprobs or 0)
        self.params = replace(params, temperature=0.0, min_tokens=0, stop_token_ids=(), logprobs=count)
        """Parameters of a beam's row: greedy, with the log-probabilities of its most likely tokens."""
        self._running = [_Beam(0, 0.0)]
        self._hypotheses: list[_Hypothesis] = []
        self._length = 0

    def collect(self, index: int, candidates: TokenLogprob) -> None:
        """Record the most likely next tokens of the beam in sequence `index`."""
        beam = next(beam for beam in self._running if beam.index == index)
        assert beam.candidates is None, "a beam was computed twice"
        beam.candidates = candidates

    @property
    def is_complete(self) -> bool:
        """Whether all beams have their candidates."""
        return all(beam.candidates is not None for beam in self._running)

    def has_candidates(self, index: int) -> bool:
        """Whether the beam in sequence `index` already has its candidates."""
        return any(beam.index == index and beam.candidates is not None for beam in self._running)

    def advance(self) -> list[Branch]:
        """Advance by one token: the surviving branches, best first; none if the search has ended."""
        self._length += 1
        goes_on = self._compare()
        if self._has_ended(goes_on):
            self._running = []
            return []
        parents = {continuation.beam.index for continuation in goes_on}
        free = iter([index for index in range(self._beams.num_beams) if index not in parents])
        branches, beams = [], []
        for score, parent, token, logprob in goes_on:
            # The first child continues in its parent's sequence, which spares a fork; later ones take discarded beams'.
            index = parent.index if parent.index in parents else next(free)
            parents.discard(parent.index)
            branches.append(Branch(index, parent.index, token))
            beams.append(_Beam(index, score, self._extend(parent, token, logprob)))
        self._running = beams
        return branches

    def _compare(self) -> list[_Continuation]:
        """The best unfinished continuations; finished ones among the overall best become hypotheses."""
        num_beams, at_end = self._beams.num_beams, self._length == self._params.max_tokens
        goes_on: list[_Continuation] = []
        for rank, continuation in enumerate(self._ranked()):
            if at_end or continuation.token in self._stop_ids:
                if rank < num_beams:
                    self._conclude(continuation)
            elif len(goes_on) < num_beams:
                goes_on.append(continuation)
            if rank >= num_beams - 1 and (at_end or len(goes_on) == num_beams):
                break
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # stable: ties keep the older one first
        del self._hypotheses[num_beams:]
        return goes_on

    def _ranked(self) -> Iterator[_Continuation]:
        """Continuations of all beams, best first."""
        return heapq.merge(*map(self._continuations, self._running), key=lambda hypothesis: -hypothesis.score)

    def _continuations(self, beam: _Beam) -> Iterator[_Continuation]:
        assert beam.candidates is not None, "a beam is compared that was not computed"
        barred = self._stop_ids if self._length <= self._params.min_tokens else frozenset()
        for token, logprob in beam.candidates.top:
            if token not in barred and logprob > -math.inf:
                yield _Continuation(beam.score + logprob, beam, token, logprob)

    def _conclude(self, continuation: _Continuation) -> None:
        score, beam, token, logprob = continuation
        reason = FinishReason.STOP if token in self._stop_ids else FinishReason.LENGTH
        # The length includes the stop token, as in `transformers`.
        score /= self._length**self._beams.length_penalty
        self._hypotheses.append(_Hypothesis(score, self._extend(beam, token, logprob), reason))

    def _extend(self, beam: _Beam, token: int, logprob: float) -> Trail:
        assert beam.candidates is not None
        named = self._params.logprobs or 0
        return Trail(TokenLogprob(token, logprob, beam.candidates.top[:named]), beam.trail)

    def _has_ended(self, goes_on: list[_Continuation]) -> bool:
        early, penalty = self._beams.early_stopping, self._beams.length_penalty
        if not goes_on:
            return True
        if len(self._hypotheses) < self._beams.num_beams:
            return False
        if early is True:
            return True
        length = self._params.max_tokens if early == "never" and penalty > 0 else self._length
        hoped_for: float = goes_on[0].score / length**penalty
        return hoped_for <= self._hypotheses[-1].score

    def outputs(self, request_id: str) -> list[SequenceOutput]:
        """The answers of a finished search, best first, each complete."""
        return [self._output(request_id, index) for index in range(self._params.n)]

    def _output(self, request_id: str, index: int) -> SequenceOutput:
        if index >= len(self._hypotheses):
            return SequenceOutput(request_id, index, [], finish_reason=FinishReason.ERROR, error=TOO_FEW)
        hypothesis = self._hypotheses[index]
        entries: list[TokenLogprob] = []
        trail: Trail | None = hypothesis.trail
        while trail is not None:
            entries.append(trail.entry)
            trail = trail.before
        entries.reverse()
        return SequenceOutput(
            request_id,
            index,
            [entry.token_id for entry in entries],
            None if self._params.logprobs is None else entries,
            hypothesis.reason,
            score=hypothesis.score,
        )
