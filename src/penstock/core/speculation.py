"""Speculation controller: chooses how many drafts to verify, by measured step costs and acceptance rates.

A step of n tokens takes T(n) seconds. A draft of k tokens, each accepted with probability a if those before it are,
yields a + a**2 + ... + a**k tokens on average. The drafts of a step are chosen to maximise its tokens per second:

    (sequences + sum of the drafts' acceptance probabilities) / (T(tokens) + drafting seconds)

T is measured from past steps, and a for each sequence from its past drafts; the load and context lengths affect T. Both
depend on timing and on other requests; the answers do not.
"""

import heapq
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from penstock.core.costs import WINDOW, Acceptance, StepCosts
from penstock.core.sequence import INT32, Sequence
from penstock.core.step import Step
from penstock.dataclass import dataclass
from penstock.errors import EngineDeadError

Draft: TypeAlias = "array[int]"
"""Predicted next tokens of a sequence; int32, may be empty. Not modified after it is returned."""
NO_DRAFT: Draft = array(INT32)


class Drafter(Protocol):
    """Drafts the next tokens of sequences between two steps.

    A draft is computed as if it were the sequence's next tokens, by the step that verifies it. A good draft saves
    steps, a bad one costs a little time; neither changes the answer (docs/sampling.md explains why).

    Per-sequence state must be recomputable from the sequence's tokens: any sequence may be drafted for at any time,
    with tokens added since the last call. A drafter may read a sequence's `sequence_id`, `tokens`, `params`, `index`,
    `max_length` and `request`, and nothing else.
    """

    free: bool
    """Whether drafting costs almost nothing: the drafter is then asked at each step, even just to measure it, and
    before drafters that are not free."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        """Draft next tokens for each sequence, at most the given number, which is at least one."""
        ...

    def forget_sequence(self, seq: Sequence) -> None:
        """Called when a sequence, perhaps an unknown one, has ended."""
        ...


MEMORY = 0.8
"""Weight that a sequence's acceptance rate keeps after each further draft."""
MEMORY_OF_ALL = 0.99
"""The same for the rate of all sequences together."""
FIRST_CHANCE = 0.5
"""Acceptance rate assumed before the first draft."""
LEAST_GAIN = 1.05
"""Minimum estimated speed-up for computing drafts."""
HOPELESS = 0.8
"""Search cut-off: longer drafts are not considered once the rate falls below this share of the best."""
LEAST_COST = 0.01
"""Minimum cost of a drafted token relative to a decode, as measurements may suggest zero."""
MAX_WASTED_SHARE = 0.003
"""Maximum share of the time spent on drafting while drafts do not pay."""
MAX_PAUSE = 64
"""Maximum steps without drafting after drafts that did not pay."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _DraftRequest:
    """A draft for one of the step's decodes, proposed or still to be requested."""

    index: int
    """Index of the sequence among the step's decodes."""
    seq: Sequence
    limit: int
    acceptance: Acceptance
    draft: Draft
    """Empty until requested, for drafters that are not free."""
    known: int
    """Tokens of the sequence before the draft."""
    count: int = 0
    """Number of draft tokens that the step computes."""


class Speculation:
    """Requests drafts for the decodes of a step, and decides how many of their tokens to compute.

    Free drafters are asked for all decodes, in order, until one returns a draft; the others are asked for the remaining
    decodes, if that pays.
    """

    def __init__(self, drafters: Iterable[Drafter], num_drafts: int, clock: Callable[[], float]) -> None:
        """
        Args:
            num_drafts: maximum drafted tokens per sequence and step.
        """
        self.num_drafts = num_drafts
        self._drafters = list(drafters)
        self._clock = clock
        self._costs = StepCosts()
        self._seconds_per_token: deque[float] = deque([0.0], maxlen=WINDOW)  # per token, for drafters that are not free
        self._acceptance: dict[int, Acceptance] = {}
        self._overall = Acceptance(MEMORY_OF_ALL)
        self._requests: list[_DraftRequest] = []
        self._began = 0.0
        self._draft_seconds = 0.0
        self._pause = 0  # remaining steps without drafting
        self._paused = False  # in the current step

    def begin_step(self) -> None:
        """Called before a step is built."""
        self._requests = []
        self._paused = self._pause > 0
        if self._paused:
            self._pause -= 1
            return
        self._draft_seconds = 0.0
        self._began = self._clock()

    def propose(self, step: Step, budget: int) -> "list[tuple[int, array[int]]]":
        """Drafts that pay, with the indices of their decodes; at most `budget` tokens in all."""
        num_decodes = step.num_decodes + step.num_returned
        if self._paused or budget <= 0 or not num_decodes or not self._costs.known:
            return []
        began = self._clock()
        num_tokens = sum(step.query_lens)
        indices, wanted = self._askable(step)
        drafts = self._ask(wanted, free=True)
        requests = self._requests = [
            _DraftRequest(index, seq, limit, self._acceptance_of(seq), draft, known=len(seq.tokens))
            for index, (seq, limit), draft in zip(indices, wanted, drafts, strict=True)
            if draft or self._costly
        ]
        if requests:
            self._allot(num_decodes, num_tokens, budget)
        # Only now are the drafters asked that compute: for as many tokens as pay, of the sequences that pay.
        kept = [request for request in requests if request.count]
        missing = [request for request in kept if not request.draft]
        late = self._ask([(request.seq, request.count) for request in missing], free=False)
        for request, draft in zip(missing, late, strict=True):
            request.draft = draft
        # Deciding against drafts took time as well; the pause keeps it below a share of the steps.
        if not kept:
            seconds = self._clock() - began
            self._pause = min(MAX_PAUSE, int(seconds / (MAX_WASTED_SHARE * self._costs.seconds(num_tokens))))
        return [(request.index, request.draft[: request.count]) for request in kept if request.draft]

    def _askable(self, step: Step) -> tuple[list[int], list[tuple[Sequence, int]]]:
        """The step's decodes that may have drafts: their indices, and the maximum length of each draft."""
        indices: list[int] = []
        wanted: list[tuple[Sequence, int]] = []
        for index, seq in enumerate(step.sequences[: step.num_decodes + step.num_returned]):
            limit = min(self.num_drafts, seq.max_length - len(seq.tokens) - 1)
            if limit > 0 and not seq.siblings and seq.beams is None:
                indices.append(index)
                wanted.append((seq, limit))
        return indices, wanted

    def end_step(self, num_tokens: int) -> None:
        """Learn from a completed step of `num_tokens` tokens, whose sequences have their new tokens."""
        if self._paused:
            return
        for request in self._requests:
            draft = request.draft
            came = request.seq.tokens[request.known : request.known + len(draft)]
            right = _common(came, draft)
            wrong = right < len(came)
            request.acceptance.learn(right, wrong)
            self._overall.learn(right, wrong)
            if not draft:
                request.acceptance.fade()
        # Without the drafters' time, which `_seconds_per_token` has.
        self._costs.observe(num_tokens, self._clock() - self._began - self._draft_seconds)

    def forget_sequence(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._acceptance.pop(seq.sequence_id, None)
        for drafter in self._drafters:
            drafter.forget_sequence(seq)

    def _acceptance_of(self, seq: Sequence) -> Acceptance:
        acceptance = self._acceptance.get(seq.sequence_id)
        if acceptance is None:
            acceptance = self._acceptance[seq.sequence_id] = Acceptance(MEMORY)
        return acceptance

    def _ask(self, wanted: list[tuple[Sequence, int]], *, free: bool) -> list[Draft]:
        """Drafts for each sequence from the free drafters, or from the others. A drafter that raises is disabled."""
        drafts = [NO_DRAFT] * len(wanted)
        for drafter in list(self._drafters):
            unknown = [index for index, draft in enumerate(drafts) if not draft]
            if drafter.free is not free or not unknown:
                continue
            began = self._clock()
            try:
                proposed = drafter.propose([wanted[index] for index in unknown])
            # The device is lost, or a rank is gone: no other step can succeed either.
            except EngineDeadError:
                raise
            except Exception:
                logger.exception("%s failed: the engine goes on without it", type(drafter).__name__)
                self._drafters.remove(drafter)
                continue
            for index, draft in zip(unknown, proposed, strict=True):
                drafts[index] = draft
            seconds = self._clock() - began
            self._draft_seconds += seconds
            if not free:
                self._seconds_per_token.append(seconds / max(1, sum(map(len, proposed))))
        return drafts

    @property
    def _costly(self) -> bool:
        return not all(drafter.free for drafter in self._drafters)

    def _allot(self, num_decodes: int, num_tokens: int, budget: int) -> None:
        """Set the number of tokens to compute of each draft."""
        offers, worth = self._offers(num_decodes, num_tokens, budget)
        for request in self._requests:
            request.count = 0
        for index in offers[:worth]:
            self._requests[index].count += 1

    def _offers(self, num_decodes: int, num_tokens: int, budget: int) -> tuple[list[int], int]:
        """All draft tokens, most likely first, each as the index of its draft; and how many of them pay."""
        prior = self._overall.chance(FIRST_CHANCE)
        # The median, since drafting takes longer when a sequence's backlog must be computed first.
        seconds = sorted(self._seconds_per_token)[len(self._seconds_per_token) // 2]
        chances = [request.acceptance.chance(prior) for request in self._requests]
        left = [len(request.draft) or (request.limit if self._costly else 0) for request in self._requests]
        if self._overall.is_new:  # the first token of a draft teaches as much as a long rejected one
            left = [min(count, 1) for count in left]
        heap = [
            (-chance, index)
            for index, (request, chance) in enumerate(zip(self._requests, chances, strict=True))
            if left[index]
        ]
        heapq.heapify(heap)
        estimate = self._costs.seconds
        gain, drafting = float(num_decodes), 0.0
        without = estimate(num_tokens)
        best, worth = LEAST_GAIN * gain / without, 0
        offers: list[int] = []
        while heap and len(offers) < budget:
            kept, index = heap[0]
            offers.append(index)
            request = self._requests[index]
            gain -= kept
            drafting += 0.0 if request.draft else seconds
            step = max(estimate(num_tokens + len(offers)), without * (1 + LEAST_COST * len(offers) / num_decodes))
            rate = gain / (step + drafting)
            if rate > best:
                best, worth = rate, len(offers)
            elif rate < HOPELESS * best:
                break
            left[index] -= 1
            request.count += 1
            if not left[index]:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (kept * chances[index], index))
        return offers, worth


def _common(left: "array[int]", right: "array[int]") -> int:
    """Length of the common prefix."""
    if left == right[: len(left)]:
        return len(left)
    return next(index for index, (token, other) in enumerate(zip(left, right, strict=False)) if token != other)
