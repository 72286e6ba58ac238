"""Continuous batching: selects the sequences of a step and their tokens, and applies the results.

There is no prefill phase and no decode phase. A sequence has `len(tokens)` tokens; `num_computed` of them are in the
KV cache; a step computes the missing ones, in this order, within one token budget:

    1. running sequences that lack one token (decodes), each gets it; then those that also lack a few accepted drafts,
       whose states were dropped together with rejected ones
    2. running sequences that lack more (chunked prompts, recomputation after preemption), in turns of their tenants
    3. waiting sequences, in the order of the queue policy, as the admission policy and the blocks allow
       (in 2 and 3 with layers of the vision tower for their images, within the same budget: `ImageWork`)
    4. drafts for tokens after the decodes, as proposed by speculation, within the remaining budget

Before these, waiting sequences of tenants within their share start at the cost of tenants above theirs (`Shares`).

On admission a sequence gets blocks for all its known tokens, and later one more whenever it needs it. If none is
available, the sequence that loses the least work is preempted and recomputes later.

No sequence starves. The first running sequence in the queue's order is never preempted and gets a token each step, and
none overtakes the head of the queue. So under `fcfs` a request ends after at most

    sum over it and all earlier requests of  n * (cost + max_num_seqs * longest)  steps

with cost = prompt + max_tokens + layers of the vision tower for its images, and longest = the largest cost of all:
either the oldest sequence advances, or it waits for at most `max_num_seqs` younger ones beside which it cannot be
admitted, and which are not replaced when they end. A
beam search counts as  num_beams * (1 + max_tokens)  sequences: each beam may be recomputed for each token.
`FairQueue` states the bound under `fair`.
"""

import time
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from penstock.api.request import EXPIRED, ErrorReason, FinishReason, Request, Resumed, SequenceOutput
from penstock.config.image_settings import ImageSettings
from penstock.core.block_tier import BlockTier
from penstock.core.fairness import Shares
from penstock.core.images import ImageWork
from penstock.core.kv_manager import KVManager
from penstock.core.plan import BlockReason, StepPlan, StepResult, StepTrace
from penstock.core.policies import AdmissionPolicy, Load, PrefillOrder, QueuePolicy, worst_case_tokens
from penstock.core.prefix_cache import cache_namespace
from penstock.core.sequence import Sequence, Status
from penstock.core.sequence_table import SequenceTable
from penstock.core.speculation import Speculation
from penstock.core.step import Step
from penstock.core.step_update import StepUpdate

LOADED_AHEAD = 8
"""Number of sequences at the head of the queue whose blocks are loaded from the lower tier at a time."""


class Scheduler:
    """All live requests, and the two halves of a step: `schedule` and `update`.

    Between a `schedule` that returned a plan and its `update`, no other method may be called.
    """

    def __init__(
        self,
        kv: KVManager,
        queue: QueuePolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        admission: AdmissionPolicy | None = None,
        speculation: Speculation | None = None,
        tier: BlockTier | None = None,
        images: ImageSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        overflow_advice: str = "",
    ) -> None:
        """
        Args:
            admission: None: every sequence may join for which there is room.
            images: costs and sizes of images; None: the model takes text only.
        """
        assert max_num_batched_tokens >= max_num_seqs >= 1, "each running sequence must get its token in a step"
        self.kv = kv
        self.num_preemptions = 0
        self.num_drafted = 0  # drafted tokens that were verified
        self.num_accepted = 0  # accepted drafted tokens
        self.trace = StepTrace()  # of the latest step
        self._queue = queue
        self._admission = admission
        self._speculation = speculation
        self.tier = tier
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._sequences = SequenceTable(kv, queue, max_num_seqs)
        self._shares = Shares(kv, self._sequences, max_num_seqs)
        self._prefill_order = PrefillOrder(queue, max_num_batched_tokens)
        self.images = None if images is None else ImageWork(images, self._sequences, queue)
        self._step_update = StepUpdate(kv, self._sequences, speculation, overflow_advice)
        self._step: Step | None = None
        self._last_victim: Request | None = None
        self._blocked: tuple[Sequence, int] | None = None  # the queue's head, and its missing blocks
        self._num_claims = 0  # since the head of the queue was last admitted

    @property
    def num_running(self) -> int:
        return len(self._sequences.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences in the queue's order."""
        return self._sequences.running

    @property
    def queue(self) -> QueuePolicy:
        """The waiting sequences."""
        return self._queue

    @property
    def is_steady(self) -> bool:
        """Whether the same sequences decode, without drafts, until one ends or a request is added or removed.

        Waiting sequences need a slot or blocks, and the latest step has freed none.
        """
        if self._speculation is not None or self._admission is not None:
            return False
        if not len(self._queue):
            return True
        blocked = self.trace.blocked
        has_ended = self.trace.num_sequences != self.num_running
        return blocked is not None and blocked[1] in ("slots", "blocks") and not has_ended and not self._has_claimants

    @property
    def _has_claimants(self) -> bool:
        return any(True for _ in self._queue.claimants())

    def request_indices(self) -> list[int]:
        """Requests in the current step, as indices in order of arrival."""
        assert self._step is not None, "no step is under way"
        return [seq.ordinal for seq in self._step.requests]

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something, or an ending has not been reported."""
        return bool(self._sequences.running or len(self._queue) or self._step_update.num_unsent)

    def add_request(self, request: Request, resumed: Resumed = (), ordinal: int | None = None) -> None:
        """Add a validated request: alone, it fits the pool, the budget and `max_num_seqs`, and has no `refusal`.

        Args:
            resumed: the state in another engine; its sequences continue separately, like preempted ones.
            ordinal: index in order of arrival, for requests added out of order; None: after the last one.
        """
        assert self._step is None, "a step is under way"
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        assert self.kv.blocks_for(longest) <= self.kv.pool.num_blocks, "the request can never fit the pool"
        assert 1 <= request.params.width <= self._max_num_seqs, "the request can never run"
        assert not request.images or self.refusal(request) is None, "the request's images can never be encoded"
        sequences = self._sequences.add_request(request, resumed, ordinal)
        if request.params.max_tokens == 0 and sequences[0].has_prompt_logprobs:
            self.finish_request(request.request_id, None, FinishReason.LENGTH)

    def refusal(self, request: Request) -> str | None:
        """Why a request's images cannot be encoded; None if they can."""
        if self.images is None:
            return "this model takes text only: leave images and sounds out"
        return next(filter(None, map(self.images.settings.refusal, request.images)), None)

    def refuse(self, request: Request, error: str) -> None:
        """End a request with images that cannot be encoded, instead of adding it."""
        self._step_update.refuse(request, error, ErrorReason.IMAGE_NOT_ENCODED)

    def requests(self) -> Iterator[Request]:
        """The unfinished requests."""
        return self._sequences.requests()

    def finish_request(
        self, request_id: str, index: int | None, reason: FinishReason, error: str | None = None
    ) -> None:
        """End one of a request's sequences, or all, in any state; ended ones are unchanged.

        A beam search ends as a whole.
        """
        assert self._step is None, "a step is under way"
        self._step_update.finish_request(request_id, index, reason, error)

    def expire(self, request_id: str) -> None:
        """End a request that has waited too long; one that has run is unaffected."""
        if all(seq.first_scheduled is None for seq in self._sequences.of(request_id)):
            self._step_update.finish_request(request_id, None, FinishReason.ERROR, EXPIRED, ErrorReason.EXPIRED)

    def withdraw(self, request_id: str) -> tuple[str, list[bytes]] | None:
        """Remove a request that continues on another engine, without an ending.

        Returns the cache namespace and the keys of its first sequence's computed blocks; None if all have ended.
        """
        assert self._step is None, "a step is under way"
        sequences = self._sequences.of(request_id)
        if not sequences:
            return None
        first = sequences[0]
        keys = list(self.kv.keys(first, first.num_computed))
        self._step_update.withdraw(request_id)
        return cache_namespace(first.request), keys

    def drain(self) -> list[SequenceOutput]:
        """Endings that no step produced, each once."""
        return self._step_update.drain()

    # ── first half: build a step ─────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan | None:
        """Build the next step; None if there is nothing to compute."""
        assert self._step is None, "a step is under way"
        if not self._sequences.running and not len(self._queue):
            return None
        if self._speculation is not None:
            self._speculation.begin_step()
        prefill_budget = None if self._admission is None else self._admission.max_prefill_tokens
        step = Step(self._budget, self._budget if prefill_budget is None else prefill_budget)
        # States that the last update forked: each sequence writes to its own from this step on.
        step.copies.extend(self.kv.drain_copies())
        self._claim(step)  # first: the sequences that it preempts must not be in the step
        if self.images is not None:
            self.images.begin_step()
        # Decodes first: a running answer never waits for another's prompt.
        prompts = self._add_decodes(step)
        self._add_prompts(step, prompts)
        self._admit(step)
        if not step.requests and self.tier is not None and self.tier.is_loading:
            return None  # loads hold the missing blocks, or the queue's head waits for one
        if self._admission is not None:
            self._admission.after_step(admitted=bool(step.trace.admitted))
        if self._speculation is not None:
            self._add_drafts(step, self._speculation)
        assert step.requests, "there is work, but nothing of it can be scheduled"
        # Not before: now it is final how many tokens each sequence computes. The bounded groups never run out.
        self.kv.extend_bounded(step.sequences, step.query_lens)
        self._step = step
        self.trace = step.trace
        plan = step.plan()
        if self.images is not None:
            self.images.complete(plan.forward, step)
        return plan

    def _claim(self, step: Step) -> None:
        """Start waiting sequences of tenants within their shares, preempting others if necessary."""
        num_tokens = min(step.budget - self._max_num_seqs, step.prefill_budget)  # running sequences need one each
        left = num_tokens
        while left > 0 and self._num_claims < self._max_num_seqs:  # then the head of the queue goes first: none starves
            claim = self._shares.claim(num_tokens, self._last_victim)
            if claim is None:
                break
            seq, slots = claim.seq, claim.num_slots
            if self._is_loading(seq):
                break
            if self._admission is not None:
                slots = min(slots, self._admission.limit([seq], self._load(step, claim.victims)))
            if seq.min_slots > slots:
                break
            if claim.donor is not None:
                lacking = seq.min_slots - self._sequences.num_free_slots
                self._sequences.keep_slots(claim.donor, claim.donor.num_slots - lacking)
            for victim in claim.victims:
                self._preempt(victim, step)
            self._sequences.drop_preempted()
            missing = self.kv.admit(seq, self._sequences.num_slots)
            assert missing is None, "a claim was made for blocks that there are not"
            self._start(seq, min(slots, self._sequences.num_free_slots), step)
            self._num_claims += 1
            left -= len(seq.tokens) - seq.num_computed

    def _add_prompts(self, step: Step, prompts: list[Sequence]) -> None:
        """Give the rest of the step's budget to running prompts."""
        oldest = self._sequences.running[0] if prompts else None
        kept = self._least_tokens(oldest) if oldest in prompts else 0
        for seq in self._prefill_order.sort(prompts, self._sequences.running):
            if seq is oldest:
                kept = 0
            self._add_chunk(seq, step, kept)

    def _least_tokens(self, oldest: Sequence | None) -> int:
        """Budget to keep for the oldest sequence: it advances in each step, whatever the tenants' turns."""
        return 1 if self.images is None or oldest is None else self.images.least_tokens(oldest)

    def _add_chunk(self, seq: Sequence, step: Step, kept: int = 0, *, has_room: bool = False) -> int:
        """Add a sequence's missing tokens to the step, within the budgets and minus `kept` tokens for another.

        Args:
            has_room: whether it has slots for all of them, as after its admission.
        """
        most = len(seq.tokens) - seq.num_computed
        if self.images is not None and seq.num_computed < seq.image_end:
            encoded, lacking = step.trace.encoded_tokens, most
            most = self.images.prepare(seq, step, kept)
            if lacking == 1 and not has_room and self.images.settings.is_attended:
                most = 0  # it decodes in the next step, and gets its slot there
            self._prefill_order.computed(seq, step.trace.encoded_tokens - encoded)
        count = step.add_chunk(seq, most, kept)
        if count:
            self._queue.prefilled(seq, count)
            self._prefill_order.computed(seq, count)
        return count

    def _add_decodes(self, step: Step) -> list[Sequence]:
        """Allocate the next slot for each running sequence that lacks one token; returns those that lack more, or an
        image.
        """
        behind: list[Sequence] = []
        returned: list[Sequence] = []
        decodes: list[Sequence] = []
        # Locals, as the loop runs for each decode of each step.
        make_room, copies, images = self.kv.make_room, step.copies, self.images
        at_tokens = images is not None and not images.settings.is_attended  # else `can_decode` decides
        for seq in self._sequences.running:
            if seq.status is not Status.RUNNING:  # just preempted for an earlier one
                continue
            if len(seq.tokens) - seq.num_computed > 1 or (at_tokens and seq.num_computed < seq.image_end):
                (returned if seq.num_returned else behind).append(seq)
            elif images is not None and not images.can_decode(seq):
                behind.append(seq)
            elif make_room(seq, copies) or self._preempt_for(seq, step):
                decodes.append(seq)
        if step.trace.preempted:  # victims may be in these lists already
            decodes, behind, returned = (
                [s for s in part if s.status is Status.RUNNING] for part in (decodes, behind, returned)
            )
            self._sequences.drop_preempted()
        step.add_decodes(decodes)
        oldest = self._sequences.running[0] if self._sequences.running else None
        keep = self._least_tokens(oldest) if behind and behind[0] is oldest else 0
        return behind + [seq for seq in returned if not step.add_returned(seq, keep)]

    def _preempt_for(self, seq: Sequence, step: Step) -> bool:
        """Preempt until there is a slot for the sequence's next token; False if there is none in this step.

        Then it was itself preempted, or it runs alone and waits for blocks that are being loaded for others. The first
        in order is never preempted, so it always finishes.
        """
        while True:
            victim = self._shares.victim_for(seq, self._last_victim)
            if victim is None:
                assert self.tier is not None, f"the pool cannot hold {seq} alone"
                assert self.tier.is_loading, f"the pool cannot hold {seq} alone"
                return False
            self._preempt(victim, step)
            if victim is seq:
                return False
            if self.kv.make_room(seq, step.copies):
                return True

    def _preempt(self, seq: Sequence, step: Step) -> None:
        """Release a running sequence's blocks, including one allocated for this step."""
        step.trace.preempted.append(seq.request_id)
        # A copy into its blocks would overwrite those of the sequence that gets them next.
        step.copies[:] = [copy for copy in step.copies if copy.target not in seq.tables[copy.group].held]
        self._sequences.preempt(seq)
        # The next victim is of another request, if possible: the same one would pay for every shortage.
        self._last_victim = seq.request
        self._blocked = None
        self.num_preemptions += 1

    def _admit(self, step: Step) -> None:
        """Admit waiting sequences in order, as far as budget, slots, blocks and the admission policy allow."""
        allowed: int | None = None
        # The policy walks the queue to answer, so it is asked only if something could join.
        has_room = step.budget > 0 and self._sequences.num_free_slots > 0 and not step.trace.preempted
        if self._admission is not None and has_room and len(self._queue):
            allowed = self._admission.limit(self._queue.in_order(), self._load(step))
        while (seq := self._queue.peek()) is not None:
            reason = self._block_reason(seq, step, allowed)
            if reason is not None:
                step.trace.blocked = (seq.request_id, reason)
                break
            free = self._sequences.num_free_slots
            self._start(seq, free if allowed is None else min(free, allowed), step)
            self._num_claims = 0  # the head had its turn, so claims may overtake again
            allowed = None if allowed is None else allowed - seq.num_slots
            added = self._add_chunk(seq, step, has_room=True)
            assert added or seq.image_end, "a sequence was admitted for which there is no budget"

    def _block_reason(self, seq: Sequence, step: Step, allowed: int | None) -> BlockReason | None:
        """Why the queue's head cannot join; None once it has its blocks."""
        # Whatever joined now would take the blocks that were just taken from another.
        if step.trace.preempted:
            return "preemption"
        if seq.min_slots > self._sequences.num_free_slots:
            return "slots"
        if step.budget <= 0 or step.prefill_budget <= 0:
            return "budget"
        if allowed is not None and seq.min_slots > allowed:
            return "admission"
        return self._give_blocks(seq)

    def _load(self, step: Step, without: Collection[Sequence] = ()) -> Load:
        running = [seq for seq in self._sequences.running if seq not in without]
        return Load(
            num_running=len(running),
            running_tokens=sum(map(worst_case_tokens, running)),
            prefilling_tokens=sum(n for n in step.query_lens if n > 1),
        )

    def _is_loading(self, seq: Sequence) -> bool:
        """Whether a waiting sequence waits for blocks from the lower tier; starts the load if that has any."""
        return self.tier is not None and not self.tier.ready(seq, self._sequences.num_slots)

    def _give_blocks(self, seq: Sequence) -> BlockReason | None:
        """Allocate the queue head's blocks, if there are enough, plus a reserve."""
        reserve = self._sequences.num_slots  # a block per running sequence, or the new one would soon be preempted
        if self._sequences.running and self._blocked is not None:  # spares a prefix lookup in every step of a long wait
            head, needed = self._blocked
            if head is seq and self.kv.num_available < needed + reserve:
                return "blocks"
        if self._is_loading(seq):
            # The head waits for the disk in any case, so the next ones read beside it.
            for later in islice(self._queue.in_order(), 1, LOADED_AHEAD):
                self._is_loading(later)
            return "loading"
        missing = self.kv.admit(seq, reserve)
        if missing is not None:
            self._blocked = (seq, missing)
            return "blocks"
        return None

    def _start(self, seq: Sequence, most_slots: int, step: Step) -> None:
        """Mark a waiting sequence with blocks as running, and record its start."""
        self._blocked = None
        self._sequences.start(seq, most_slots)
        if seq.first_scheduled is None:
            # Only once: after a preemption the hits are its own blocks, not those of an earlier request.
            seq.first_scheduled = self._clock()
            seq.num_cached_tokens = seq.num_computed
        step.trace.admitted.append((seq.request_id, seq.num_computed))

    def _add_drafts(self, step: Step, speculation: Speculation) -> None:
        """Add drafts after decodes and returned sequences, as far as tokens, samples and blocks allow."""
        # The workspace is planned for `max_num_seqs + num_drafts` samples, one of them for each running sequence.
        budget = min(step.budget, self._sequences.num_free_slots + speculation.num_drafts)
        for index, tokens in speculation.propose(step, budget):
            room = self.kv.begin_drafts(step.sequences[index], len(tokens))
            step.add_drafts(index, tokens[:room])
        self.num_drafted += step.trace.num_drafted

    # ── second half: apply the result ────────────────────────────────────────────────────────────────────────────────

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Apply a step's result: append the sampled tokens, and end finished sequences."""
        step = self._step
        assert step is not None, "no step is under way"
        self._step = None
        for digest in result.broken_images:
            self._drop_image(digest)
        outputs, served = self._step_update.apply_result(step, result)
        self.num_accepted += step.trace.num_accepted
        self._queue.served(served)
        if self._speculation is not None and not step.encode:  # whose time says little of tokens
            self._speculation.end_step(step.trace.num_tokens)
        return outputs

    def _drop_image(self, digest: bytes) -> None:
        assert self.images is not None, "the model takes text only"
        self.images.drop(digest)

    def fail_step(self, error: str) -> list[SequenceOutput]:
        """End the sequences of a failed step with `error`; all others continue."""
        step = self._step
        assert step is not None, "no step is under way"
        self._step = None
        # Also their sequences that are not in the step: a request fails as a whole.
        for request in {seq.request.request_id for seq in step.requests}:
            self.finish_request(request, None, FinishReason.ERROR, error)
        for part in step.encode:  # how far they came is unknown
            self._drop_image(part.digest)
        return self.drain()

    def check_integrity(self) -> None:
        """Assert the invariants between steps."""
        self._sequences.check_integrity()
        if self.images is not None:
            self.images.check_integrity()
