"""Who is live, and where: the sequences that run, those that wait, and those that depend on another.

    add ──> waiting ──start──> running ──end──> gone
               ▲                 │  │
               └───── preempt ───┘  └─ fork, rearrange: others run from where it is, sharing its blocks

Of a request's sequences the first computes the prompt for all. Those of n > 1 go their own ways from there; the beams
of a search change places after each token.
"""

from bisect import insort
from collections.abc import Iterable

from penstock.core.beam import BeamSearch, Branch
from penstock.core.kv_manager import KVManager
from penstock.core.policies import QueuePolicy
from penstock.core.sequence import Sequence, Status
from penstock.request import Request, Resumed


class Roster:
    """The live sequences; what they hold in blocks and slots is given and taken here."""

    def __init__(self, kv: KVManager, queue: QueuePolicy, max_num_seqs: int) -> None:
        self.queue = queue
        self.running: list[Sequence] = []
        """In the queue's order."""
        self.num_slots = 0
        """Of running sequences and those that will fork from them."""
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._requests: dict[str, list[Sequence]] = {}
        self._num_accepted = 0

    def of(self, request_id: str) -> list[Sequence]:
        """A request's live sequences, by their indices."""
        return self._requests.get(request_id, [])[:]

    def add(self, request: Request, resumed: Resumed, ordinal: int | None) -> list[Sequence]:
        """Queue a request's sequences; see `Scheduler.add`."""
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
        """Queue the sequences that had not ended, with the tokens that they had."""
        unfinished = [seq for seq, tokens in zip(sequences, resumed, strict=True) if tokens is not None]
        assert unfinished, "a request that has ended is resumed"
        has_begun = any(resumed)  # then all of the prompt has been told
        for place, seq in enumerate(unfinished):
            if has_begun or place:
                seq.num_scored = seq.num_prompt_tokens - 1
            seq.tokens.extend(resumed[seq.index] or ())
            self._wait(seq)
        return unfinished

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.queue.push(seq)

    def _run(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        insort(self.running, seq, key=self.queue.order_key)

    def start(self, seq: Sequence) -> None:
        """The head of the queue, which has its blocks, runs."""
        self.queue.admit(seq)
        self.num_slots += seq.num_slots
        self._run(seq)

    def preempt(self, seq: Sequence) -> None:
        """A running sequence gives up its blocks and waits. It stays in `running` until `drop_preempted`."""
        self._kv.release(seq)
        self.num_slots -= seq.num_slots
        self._wait(seq)

    def drop_preempted(self) -> None:
        """Take those that do not run any more out of `running`."""
        self.running = [seq for seq in self.running if seq.status is Status.RUNNING]

    def fork(self, seq: Sequence) -> None:
        """The prompt is computed: the siblings that waited for it share its blocks and run from here."""
        for sibling in seq.siblings:
            self._kv.fork(seq, sibling)
            sibling.first_scheduled = seq.first_scheduled
            self._run(sibling)
        seq.siblings = []

    def rearrange(self, sequences: list[Sequence], branches: list[Branch]) -> None:
        """Let the beams of a search go on as its branches say.

        A beam that its parent's blocks cannot be shared with, as it gave them up, or for which there is no slot, waits
        and is computed anew.
        """
        carrier = sequences[0]
        for sibling in carrier.siblings:
            sibling.status, sibling.first_scheduled = Status.PARKED, carrier.first_scheduled
            self.num_slots -= 1
        carrier.siblings = []
        parents = {branch.parent for branch in branches}
        self.park(seq for seq in sequences if seq.index not in parents)
        for place, parent, _ in branches:
            if place != parent:
                self._branch(sequences[parent], sequences[place])
        for place, _, token in branches:
            seq = sequences[place]
            seq.tokens.append(token)
            if seq.status is Status.PARKED:
                self._wait(seq)

    def _branch(self, parent: Sequence, seq: Sequence) -> None:
        seq.tokens = parent.tokens[:]
        if parent.status is Status.RUNNING and self.num_slots < self._max_num_seqs:
            self._kv.fork(parent, seq)
            self.num_slots += 1
            self._run(seq)

    def park(self, sequences: Iterable[Sequence]) -> None:
        """Take the blocks of beams that have nothing to compute. Their keys may stay in the prefix cache."""
        for seq in sequences:
            if seq.status is Status.RUNNING:
                self._stop(seq)
                seq.status = Status.PARKED

    def _stop(self, seq: Sequence) -> None:
        self._kv.release(seq)
        self.running.remove(seq)
        self.num_slots -= 1

    def end(self, seq: Sequence) -> None:
        """Take a sequence out of wherever it is. Its unborn siblings live on in one of them."""
        live = self._requests[seq.request_id]
        if seq.status is Status.UNBORN:
            carrier = next(one for one in live if seq in one.siblings)
            carrier.siblings.remove(seq)
            self.num_slots -= carrier.status is Status.RUNNING
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

    def _hand_over(self, seq: Sequence) -> None:
        """An unborn sibling takes the place of the one that computes the prompt for them."""
        heir, *rest = seq.siblings
        seq.siblings, heir.siblings = [], rest
        heir.status, heir.first_scheduled = seq.status, seq.first_scheduled
        if seq.status is Status.WAITING:
            self.queue.remove(seq)
            self.queue.push(heir)
        else:
            self._kv.hand_over(seq, heir)
            self.running[self.running.index(seq)] = heir
            self.num_slots -= 1

    def check_integrity(self) -> None:
        """What must hold between steps, beside the KV manager's own invariants."""
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
        assert all(not seq.block_table for seq in live if seq not in running), "a sequence that waits has blocks"
        assert all(seq.num_computed < len(seq.tokens) for seq in running), "a running sequence lacks nothing"
        assert all(not seq.num_drafts for seq in live), "a draft is left"
