"""Continuous batching: which sequences a step computes, how many tokens of each, and what became of them.

There is no prefill phase and no decode phase. A sequence has `len(tokens)` tokens, of which `num_computed` are in the
KV cache; a step closes the gap, in this order, under one budget of tokens:

    1. running sequences that lack one token (decodes), each gets it
    2. running sequences that lack more (prompts in chunks, preempted ones that recompute)
    3. waiting sequences, as the queue policy orders them and the admission policy and the blocks allow
    4. drafts: guesses of what comes after a decode's token, as speculation proposes and what is left allows

A sequence gets blocks for all its known tokens when it is admitted, and one more whenever it outgrows them. When there
is none, the victim that loses the least work gives up its blocks and recomputes later.

Nobody starves. The first running sequence in the queue's order is never preempted and gets a token each step, and
nobody overtakes the head of the queue. So under `fcfs` a request ends after at most

    sum over it and the requests that came before it of  n * (cost + max_num_seqs * longest)  steps

with cost = prompt + max_tokens and longest = the largest cost of all: either the oldest sequence advances, or it waits
for at most `max_num_seqs` younger ones that it cannot be admitted beside, which end without being replaced. A beam
search counts as  num_beams * (1 + max_tokens)  sequences: each beam may have to be computed anew for each token.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable

from penstock.core.account import Obstacle, StepAccount
from penstock.core.beam import BeamSearch
from penstock.core.kv_manager import KVManager
from penstock.core.plan import COMPLETE, GRAMMAR_FAILED, NO_TOKEN_LEFT, NOT_FINITE, StepPlan, StepResult
from penstock.core.policies import AdmissionPolicy, AdmitAll, Load, QueuePolicy, worst_case_tokens
from penstock.core.roster import Roster
from penstock.core.sequence import Sequence, Status
from penstock.core.speculation import Speculation
from penstock.core.step import Step
from penstock.request import FinishReason, PromptPart, Request, Resumed, SequenceOutput, TokenLogprob

EXPIRED = "the request waited in the queue for as long as it may"
FAILURES = {
    NOT_FINITE: "the model's logits were not finite numbers",
    NO_TOKEN_LEFT: "no token is left to choose from: the request's controls rule out all that may come here",
    GRAMMAR_FAILED: "the form that the answer must have became too complex to follow, or leaves no token here",
}


class Scheduler:
    """The state of all live requests, and the loop's two halves: `schedule` and `update`.

    Between a `schedule` that gave a plan and its `update`, nothing else may be called.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs >= 1, "each running sequence must get its token in a step"
        self.kv = kv
        self.num_preemptions = 0
        self.num_drafted = 0  # tokens that were guessed and computed
        self.num_accepted = 0  # those of them that were right
        self.account = StepAccount()  # of the latest step
        self._queue = queue
        self._admission = admission or AdmitAll()
        self._speculation = speculation
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._clock = clock
        self._roster = Roster(kv, queue, max_num_seqs)
        self._ended: list[SequenceOutput] = []  # endings that no step produced
        self._searches: dict[str, BeamSearch] = {}  # that got something from the step just made
        self._step: Step | None = None
        self._last_victim: Request | None = None
        self._blocked: tuple[Sequence, int] | None = None  # the queue's head, and the blocks that it lacks

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def under_way(self) -> list[int]:
        """The requests in the step under way, as places in the order of arrival."""
        assert self._step is not None, "no step is under way"
        return [seq.ordinal for seq in self._step.sequences]

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, or an ending has not been told yet."""
        return bool(self._roster.running or len(self._queue) or self._ended)

    def add(self, request: Request, resumed: Resumed = (), ordinal: int | None = None) -> None:
        """Accept a request. It has been validated: alone, it fits the pool, the budget and `max_num_seqs`.

        Args:
            resumed: where another engine left it; each of its sequences goes on on its own, as preempted ones do.
            ordinal: its place in the order of arrival, if some come late; None: the one after the last.
        """
        assert self._step is None, "a step is under way"
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        assert self.kv.blocks_for(longest) <= self.kv.pool.num_blocks, "the request can never fit the pool"
        assert 1 <= request.params.num_sequences <= self._max_num_seqs, "the request can never run whole"
        sequences = self._roster.add(request, resumed, ordinal)
        if request.params.max_tokens == 0 and sequences[0].is_scored:
            self.finish(request.request_id, None, FinishReason.LENGTH)

    def finish(self, request_id: str, index: int | None, reason: FinishReason, error: str | None = None) -> None:
        """End one of a request's sequences, or all of them, wherever they are; what has ended already stays so.

        A beam search ends as a whole.
        """
        assert self._step is None, "a step is under way"
        for seq in self._roster.of(request_id):
            if index is None or seq.index == index or seq.beams is not None:
                self._end(seq)
                if seq.index < seq.request.params.n:
                    self._ended.append(SequenceOutput(request_id, seq.index, [], finish_reason=reason, error=error))

    def expire(self, request_id: str) -> None:
        """End a request that has waited long enough; one that ran is left alone."""
        if all(seq.first_scheduled is None for seq in self._roster.of(request_id)):
            self.finish(request_id, None, FinishReason.ERROR, EXPIRED)

    def drain(self) -> list[SequenceOutput]:
        """The endings that no step produced, once each."""
        ended, self._ended = self._ended, []
        return ended

    # ── the first half: put a step together ──────────────────────────────────────────────────────────────────────────

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""
        assert self._step is None, "a step is under way"
        if not self._roster.running and not len(self._queue):
            return None
        if self._speculation is not None:
            self._speculation.begin()
        prefill_budget = self._admission.max_prefill_tokens
        step = Step(self._budget, self._budget if prefill_budget is None else prefill_budget)
        for seq in self._add_decodes(step):
            if seq.status is Status.RUNNING and not step.add_chunk(seq):
                break
        self._admit(step)
        self._admission.stepped(admitted=bool(step.account.admitted))
        if self._speculation is not None:
            self._add_drafts(step, self._speculation)
        assert step.sequences, "there is work, but nothing of it can be scheduled"
        self._step = step
        self.account = step.account
        return step.plan()

    def _add_decodes(self, step: Step) -> list[Sequence]:
        """Give each running sequence that lacks one token its slot; return those that lack more."""
        behind: list[Sequence] = []
        decodes: list[Sequence] = []
        make_room, copies = self.kv.make_room, step.copies
        for seq in self._roster.running:
            if seq.status is not Status.RUNNING:  # preempted just now, for an earlier one
                continue
            if len(seq.tokens) - seq.num_computed > 1:
                behind.append(seq)
            elif make_room(seq, copies) or self._preempt_for(seq, step):
                decodes.append(seq)
        step.add_decodes(decodes)
        if step.account.preempted:
            self._roster.drop_preempted()
        return behind

    def _preempt_for(self, seq: Sequence, step: Step) -> bool:
        """Preempt until there is a slot for the sequence's next token; False if it was itself a victim."""
        while True:
            victim = self._choose_victim(seq)
            step.account.preempted.append(victim.request_id)
            self._preempt(victim)
            if victim is seq:
                return False
            if self.kv.make_room(seq, step.copies):
                return True

    def _choose_victim(self, seq: Sequence) -> Sequence:
        """Among `seq` and those after it in order, the one that loses the least work.

        Those before it are safe, and the first of all is never a victim, so it always gets to its end. The request
        that was preempted last is spared while there is another.
        """
        first = self._roster.running.index(seq)
        candidates = [s for s in self._roster.running[max(first, 1) :] if s.status is Status.RUNNING]
        others = [s for s in candidates if s.request is not self._last_victim]
        assert candidates, f"the pool cannot hold {seq} alone"
        return min(reversed(others or candidates), key=lambda s: s.num_computed)

    def _preempt(self, seq: Sequence) -> None:
        self._roster.preempt(seq)
        self._last_victim = seq.request
        self._blocked = None
        self.num_preemptions += 1

    def _admit(self, step: Step) -> None:
        """Let waiting sequences join, in order, until budget, slots, blocks or the admission policy say no."""
        slots = self._max_num_seqs - self._roster.num_slots
        allowed: int | None = None
        if step.budget > 0 and slots > 0 and len(self._queue) and not step.account.preempted:
            allowed = self._admission.limit(self._queue.in_order(), self._load(step))
        while (seq := self._queue.peek()) is not None:
            obstacle = self._obstacle(seq, step, slots, allowed)
            if obstacle is not None:
                step.account.held_up = (seq.request_id, obstacle)
                break
            slots -= seq.num_slots
            allowed = None if allowed is None else allowed - seq.num_slots
            added = step.add_chunk(seq)
            assert added
            step.account.admitted.append((seq.request_id, seq.num_computed))

    def _obstacle(self, seq: Sequence, step: Step, slots: int, allowed: int | None) -> Obstacle | None:
        """Admit the queue's head, or say what keeps it from joining."""
        if step.account.preempted:
            return "preemption"
        if seq.num_slots > slots:
            return "slots"
        if step.budget <= 0 or step.prefill_budget <= 0:
            return "budget"
        if allowed is not None and seq.num_slots > allowed:
            return "admission"
        return None if self._try_admit(seq) else "blocks"

    def _load(self, step: Step) -> Load:
        return Load(
            num_running=len(self._roster.running),
            running_tokens=sum(map(worst_case_tokens, self._roster.running)),
            prefilling_tokens=sum(n for n in step.query_lens if n > 1),
        )

    def _try_admit(self, seq: Sequence) -> bool:
        """Move the queue's head to the running ones, if there are blocks for it and a reserve for those that run.

        The reserve is a block for each of them: without it, the newcomer's blocks would be wanted back at once.
        """
        reserve = self._roster.num_slots
        if self._roster.running and self._blocked is not None:
            head, needed = self._blocked
            if head is seq and self.kv.num_available < needed + reserve:
                return False
        missing = self.kv.admit(seq, reserve)
        if missing is not None:
            self._blocked = (seq, missing)
            return False
        self._blocked = None
        self._roster.start(seq)
        if seq.first_scheduled is None:
            seq.first_scheduled = self._clock()
            seq.num_cached_tokens = seq.num_computed
        return True

    def _add_drafts(self, step: Step, speculation: Speculation) -> None:
        """Let decodes be followed by guesses of their next tokens, as far as tokens, samples and blocks are left.

        A step has at most `num_drafts` more samples than sequences may run: the workspace is planned for these.
        """
        budget = min(step.budget, self._max_num_seqs - self._roster.num_slots + speculation.num_drafts)
        for place, tokens in speculation.propose(step, budget):
            room = self.kv.grow(step.sequences[place], 1 + len(tokens)) - 1
            step.add_drafts(place, tokens[:room])
        self.num_drafted += step.account.num_drafted

    # ── the second half: what became of it ───────────────────────────────────────────────────────────────────────────

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Take in what the step sampled: each sequence's new tokens, and its ending if this was it."""
        step = self._step
        assert step is not None, "no step is under way"
        self._step = None
        size = self.kv.block_size
        for seq, count in zip(step.sequences, step.query_lens, strict=True):
            if seq.num_drafts:
                continue  # how many of its tokens are right is yet to be seen
            seq.num_computed += count
            if seq.num_computed >= (seq.num_committed + 1) * size:
                self.kv.commit(seq)
            if seq.siblings and seq.num_computed == len(seq.tokens) and seq.beams is None:
                self._roster.fork(seq)
        outputs = self.drain()
        if step.scored:
            self._tell_prompts(step, result.scores, outputs)
        if step.account.num_drafted:
            served = self._take_judged(step, result, outputs)
        else:
            served = step.sampled
            logprobs: Iterable[TokenLogprob | None] = result.logprobs or itertools.repeat(None, len(served))
            for seq, token, logprob in zip(served, result.token_ids, logprobs, strict=True):
                self._take(seq, [token], None if logprob is None else [logprob], outputs)
        if self._searches:
            self._advance_searches(outputs)
        self._queue.served(served)
        if self._speculation is not None:
            self._speculation.end(step.account.num_tokens)
        return outputs

    def _take_judged(self, step: Step, result: StepResult, outputs: list[SequenceOutput]) -> list[Sequence]:
        """Add the new tokens of a step with drafts; returns whose each of them is.

        A sequence's are those sampled up to the first that differs from its draft, which is right itself.
        """
        served: list[Sequence] = []
        place, sampled = 0, step.sampled
        while place < len(sampled):
            seq = sampled[place]
            end = kept = place + 1
            if seq.num_drafts and seq.status is not Status.FINISHED:
                end += seq.num_drafts
                kept += self._judge(seq, result.token_ids[place:end])
                step.account.num_accepted += kept - place - 1
            entries = result.logprobs[place:kept] if result.logprobs is not None else []
            told = [entry for entry in entries if entry is not None]
            served += [seq] * self._take(seq, result.token_ids[place:kept], told or None, outputs)
            place = end
        self.num_accepted += step.account.num_accepted
        return served

    def _judge(self, seq: Sequence, sampled: list[int]) -> int:
        """How many of a sequence's drafts are what was sampled there; all of them are taken back.

        The keys of those stay, and may be entered into the prefix cache. Those of wrong ones are as if never computed:
        what comes in their place is written over them.
        """
        tokens = seq.tokens
        known, right = len(tokens) - seq.num_drafts, 0
        while right < seq.num_drafts and tokens[known + right] == sampled[right]:
            right += 1
        del tokens[known + right :]
        seq.num_drafts = 0
        seq.num_computed = known + right
        self.kv.shrink(seq)
        if seq.num_computed >= (seq.num_committed + 1) * self.kv.block_size:
            self.kv.commit(seq)
        del tokens[known:]
        return right

    def fail(self, error: str) -> list[SequenceOutput]:
        """The step could not be computed: its sequences end with `error`, all others go on."""
        step = self._step
        assert step is not None, "no step is under way"
        self._step = None
        for request in {seq.request.request_id for seq in step.sequences}:
            self.finish(request, None, FinishReason.ERROR, error)
        return self.drain()

    def _tell_prompts(self, step: Step, scores: list[TokenLogprob], outputs: list[SequenceOutput]) -> None:
        """Pass on what was computed of prompts, and end the requests that ask for no more."""
        place = 0
        for seq, count in step.scored:
            part = PromptPart(seq.num_scored + 1, scores[place : place + count])
            place += count
            seq.num_scored += count
            if any(math.isnan(entry.logprob) for entry in part.logprobs):
                self.finish(seq.request_id, None, FinishReason.ERROR, FAILURES[NOT_FINITE])
            else:
                outputs.append(self._report(seq, SequenceOutput(seq.request_id, seq.index, [], prompt=part)))
                if seq.is_scored and not seq.request.params.max_tokens:
                    self.finish(seq.request_id, None, FinishReason.LENGTH)
        outputs += self.drain()

    def _report(self, seq: Sequence, output: SequenceOutput) -> SequenceOutput:
        """Let the facts of how it began go along with a sequence's first output."""
        if not seq.reported:
            seq.reported = True
            output.first_scheduled = seq.first_scheduled
            output.num_cached_tokens = seq.num_cached_tokens
        return output

    def _take(
        self,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        outputs: list[SequenceOutput],
    ) -> int:
        """A sequence got new tokens, or a beam its candidates; returns how many tokens it goes on with."""
        if seq.status is Status.FINISHED:  # for another reason, in this step
            return 0
        if seq.beams is None:
            outputs.append(self._append(seq, token_ids, logprobs))
            return len(outputs[-1].token_ids)
        if token_ids[0] < 0:
            self.finish(seq.request_id, None, FinishReason.ERROR, FAILURES[token_ids[0]])
            outputs += self.drain()
            return 0
        assert logprobs is not None, "a beam asks for its candidates"
        seq.beams.collect(seq.index, logprobs[0])
        self._searches[seq.request_id] = seq.beams
        return 1

    def _advance_searches(self, outputs: list[SequenceOutput]) -> None:
        """Go on with the beam searches that got something; beams that must wait for others do so without blocks.

        Their keys may stay in the prefix cache meanwhile. So a search needs no more blocks than its longest beam.
        """
        searches, self._searches = self._searches, {}
        for request_id, search in searches.items():
            sequences = self._roster.of(request_id)
            if not search.is_complete:
                self._roster.park(seq for seq in sequences if search.has_candidates(seq.index))
            elif branches := search.advance():
                self._roster.rearrange(sequences, branches)
                outputs.append(self._report(sequences[0], SequenceOutput(request_id, 0, [])))
            else:
                told = search.outputs(request_id)
                self._report(sequences[0], told[0])
                outputs += told
                for seq in sequences:
                    self._end(seq)

    def _append(self, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprob] | None) -> SequenceOutput:
        """Add a sequence's new tokens, up to one that ends it."""
        output = self._report(seq, SequenceOutput(seq.request_id, seq.index, token_ids, logprobs))
        tokens, before = seq.tokens, len(seq.tokens)
        for token in token_ids:
            if token < 0:
                output.finish_reason = FinishReason.STOP if token == COMPLETE else FinishReason.ERROR
                output.error = FAILURES.get(token)
                break
            tokens.append(token)
            if token in seq.stop_ids and len(tokens) > seq.min_length:
                output.finish_reason = FinishReason.STOP
                break
            if len(tokens) >= seq.max_length:
                output.finish_reason = FinishReason.LENGTH
                break
        if output.finish_reason is not None:
            added = len(tokens) - before
            output.token_ids = token_ids[:added]
            output.logprobs = logprobs and logprobs[:added]
            self._end(seq)
        return output

    def _end(self, seq: Sequence) -> None:
        self._roster.end(seq)
        if self._speculation is not None:
            self._speculation.forget(seq)

    def check_integrity(self) -> None:
        """What must hold between steps."""
        self._roster.check_integrity()
