"""Live sequences and their states: running, waiting, or dependent on another sequence.

    add_request ──> waiting ──start──> running ──end_sequence──> gone
                       ▲                 │  │
                       └───── preempt ───┘  └─ fork, rearrange: others continue from its position, sharing its blocks

A request's first sequence computes the prompt for all. The others of n > 1 are independent from there: those with a
reserved slot fork from the first, the others wait and find the prompt in the prefix cache, like a preempted sequence.
The beams of a search are reassigned after each token.
"""

from bisect import insort
from collections.abc import Iterable, Iterator

from penstock.api.request import Request, Resumed
from penstock.core.beam import BeamSearch, Branch
from penstock.core.kv_manager import KVManager
from penstock.core.policies import QueuePolicy
from penstock.core.sequence import NOT_YET, Sequence, Status


class SequenceTable:
    """The live sequences, and the allocation and release of their blocks and slots."""

    def __init__(self, kv: KVManager, queue: QueuePolicy, max_num_seqs: int) -> None:
        self.queue = queue
        self.running: list[Sequence] = []
        """In queue order."""
        self.num_slots = 0
        """Slots of running sequences and of those that will fork from them."""
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._requests: dict[str, list[Sequence]] = {}
        self._num_accepted = 0

    def of(self, request_id: str) -> list[Sequence]:
        """A request's live sequences, by index."""
        return self._requests.get(request_id, [])[:]

    def requests(self) -> Iterator[Request]:
        """Requests with live sequences."""
        return (sequences[0].request for sequences in self._requests.values())

    def add_request(self, request: Request, resumed: Resumed, ordinal: int | None) -> list[Sequence]:
        """Queue a request's sequences; see `Scheduler.add_request`."""
        assert request.request_id not in self._requests, f"request id {request.request_id!r} is live already"
        ordinal = self._num_accepted if ordinal is None else ordinal
        self._num_accepted = max(self._num_accepted, ordinal + 1)
        sequences = [Sequence(request, index, ordinal) for index in range(request.params.num_sequences)]
        if request.params.beams is not None:
            search = BeamSearch(request.params)
            for seq in sequences:
                seq.beams, seq.params = search, search.params
        if resumed:
            sequences = self._resume(sequences, resumed)
        else:
            sequences[0].siblings = sequences[1:]
            self.queue.push(sequences[0])
        self._requests[request.request_id] = sequences
        return sequences

    def _resume(self, sequences: list[Sequence], resumed: Resumed) -> list[Sequence]:
        """Queue the unfinished sequences, with their tokens so far."""
        unfinished = [seq for seq, tokens in zip(sequences, resumed, strict=True) if tokens is not None]
        assert unfinished, "a request that has ended is resumed"
        has_begun = any(resumed)  # then all of the prompt's log-probabilities were sent
        for index, seq in enumerate(unfinished):
            if has_begun or index:
                seq.num_prompt_logprobs = seq.num_prompt_tokens - 1
            seq.tokens.extend(resumed[seq.index] or ())
            self._wait(seq)
        return unfinished

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.queue.push(seq)

    def _run(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        # In order: the first is never preempted, and a sequence costs only those after it their blocks.
        insort(self.running, seq, key=self.queue.order_key)

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - self.num_slots

    def start(self, seq: Sequence, most_slots: int) -> None:
        """Run a waiting sequence that has its blocks, reserving slots for as many of its siblings as allowed."""
        seq.num_slots = min(1 + len(seq.siblings), most_slots)
        assert seq.num_slots >= seq.min_slots, f"{seq} cannot run in {most_slots} slots"
        self.queue.admit(seq)
        self.num_slots += seq.num_slots
        self._run(seq)

    def preempt(self, seq: Sequence) -> None:
        """Release a running sequence's blocks and queue it. It stays in `running` until `drop_preempted`."""
        self._kv.release(seq)
        self.num_slots -= seq.num_slots
        self._wait(seq)

    def drop_preempted(self) -> None:
        """Remove sequences that no longer run from `running`."""
        self.running = [seq for seq in self.running if seq.status is Status.RUNNING]

    def fork(self, seq: Sequence) -> None:
        """Fork the siblings with a reserved slot after the prompt was computed, and queue the others."""
        running, waiting = seq.forks, seq.siblings[seq.num_slots - 1 :]
        seq.siblings, seq.num_slots = [], 1
        for sibling in running:
            _follow(seq, sibling)
            self._kv.fork(seq, sibling)
            self._run(sibling)
        for sibling in waiting:
            _follow(seq, sibling)
            sibling.turn, sibling.num_charged = NOT_YET, 0  # admitted and charged separately
            self._wait(sibling)

    def rearrange(self, sequences: list[Sequence], branches: list[Branch]) -> None:
        """Assign the beams of a search to its surviving branches.

        A beam without a slot, or whose parent has released its blocks so that they cannot be shared, waits and is
        recomputed.
        """
        carrier = sequences[0]
        for sibling in carrier.siblings:
            _follow(carrier, sibling)
            sibling.status = Status.PARKED
        self.keep_slots(carrier, 1)
        carrier.siblings = []
        parents = {branch.parent for branch in branches}
        # First the beams that are discarded: their slots are those that the forks take.
        self.park(seq for seq in sequences if seq.index not in parents)
        # All forks before any token is appended: a parent's tokens must still be those that its children share.
        for child, parent, _ in branches:
            if child != parent:
                self._branch(sequences[parent], sequences[child])
        for child, _, token in branches:
            seq = sequences[child]
            seq.tokens.append(token)
            if seq.status is Status.PARKED:
                self._wait(seq)

    def _branch(self, parent: Sequence, seq: Sequence) -> None:
        seq.tokens = parent.tokens[:]
        if parent.status is Status.RUNNING and self.num_free_slots > 0:
            self._kv.fork(parent, seq)
            self.num_slots += 1
            self._run(seq)

    def park(self, sequences: Iterable[Sequence]) -> None:
        """Release the blocks of beams that have nothing to compute. Their keys may stay in the prefix cache."""
        for seq in sequences:
            if seq.status is Status.RUNNING:
                self._stop(seq)
                seq.status = Status.PARKED

    def _stop(self, seq: Sequence) -> None:
        self._kv.release(seq)
        self.running.remove(seq)
        self.num_slots -= 1

    def end_sequence(self, seq: Sequence) -> None:
        """Remove a sequence in any state. One of its unborn siblings takes over for the others."""
        live = self._requests[seq.request_id]
        if seq.status is Status.UNBORN:
            carrier = next(other for other in live if seq in other.siblings)
            carrier.siblings.remove(seq)
            self.keep_slots(carrier, 1 + len(carrier.siblings))
        elif seq.siblings:
            self._hand_over(seq)
        elif seq.status is Status.WAITING:
            self.queue.remove(seq)
        elif seq.status is Status.RUNNING:
            self._stop(seq)
        seq.status = Status.FINISHED
        live.remove(seq)
        if not live:
            del self._requests[seq.request_id]

    def keep_slots(self, seq: Sequence, most: int) -> None:
        """Release slots that a sequence reserves for its siblings, down to `most`."""
        given_back = max(0, seq.num_slots - most)
        seq.num_slots -= given_back
        if seq.status is Status.RUNNING:
            self.num_slots -= given_back

    def _hand_over(self, seq: Sequence) -> None:
        """Make an unborn sibling replace the sequence that computes the prompt."""
        heir, *rest = seq.siblings
        self.keep_slots(seq, len(seq.siblings))
        seq.siblings, heir.siblings = [], rest
        heir.status, heir.first_scheduled = seq.status, seq.first_scheduled
        # The tenant has been charged for this prompt; the sequence that computes the rest is not charged again.
        heir.turn, heir.num_charged, heir.num_slots = seq.turn, seq.num_charged, seq.num_slots
        if seq.status is Status.WAITING:
            self.queue.remove(seq)
            self.queue.push(heir)
        else:
            self._kv.hand_over(seq, heir)
            self.running[self.running.index(seq)] = heir

    def check_integrity(self) -> None:
        """Assert the invariants between steps that the KV manager does not check."""
        live = [seq for sequences in self._requests.values() for seq in sequences]
        self._kv.check_integrity(live)
        running = [seq for seq in live if seq.status is Status.RUNNING]
        waiting = [seq for seq in live if seq.status is Status.WAITING]
        assert sorted(running, key=self.queue.order_key) == self.running, "the running list is off"
        in_order = list(self.queue.in_order())
        assert len(in_order) == len(waiting) == len(self.queue), "the queue's length is off"
        assert set(in_order) == set(waiting), "the queue is off"
        assert self.queue.peek() is (in_order[0] if in_order else None), "the queue's head is off"
        assert self.num_slots == sum(seq.num_slots for seq in running) <= self._max_num_seqs, "the slots are off"
        assert all(not seq.tables for seq in live if seq not in running), "a sequence that waits has blocks"
        assert all(seq.num_computed < len(seq.tokens) for seq in running), "a running sequence lacks nothing"
        assert all(1 <= seq.num_slots <= 1 + len(seq.siblings) for seq in running), "a slot is kept for no sequence"
        assert all(not seq.num_drafts for seq in live), "a draft is left"


def _follow(first: Sequence, sibling: Sequence) -> None:
    """Copy the state that the prompt's sequence computed for a sibling."""
    sibling.first_scheduled, sibling.num_cached_tokens = first.first_scheduled, first.num_cached_tokens
    sibling.num_prompt_logprobs = sibling.num_prompt_tokens - 1  # the first sibling reports the prompt
    sibling.turn, sibling.num_charged = first.turn, sibling.num_prompt_tokens
