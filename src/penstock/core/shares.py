"""Equal shares of slots and KV blocks between tenants: who may overtake the queue, and at whose cost.

Let T tenants have sequences that run or wait. The share of each is `max(1, max_num_seqs // T)` slots and
`num_blocks // T` blocks. Nothing is kept free for anybody: a tenant may hold more than its share for as long as no
other asks for its own.

**A claim.** A waiting sequence starts at once, before the head of the queue and before the prompts of others, if the
queue policy names it (`QueuePolicy.claimants`) and its tenant is within its share with it. If slots or blocks lack,
they are taken from the tenants that are most above their share of these: first slots that are kept for siblings not yet
running, then those of running sequences, which are preempted, those that lose the least work first and no more of them
than it takes. If that does not suffice, nobody is preempted.

**No thrashing.** A tenant that is within its share loses nothing to a claim, and whoever claims is within its share
with what it got, so two tenants cannot take the same slot from each other in turn. A claim for a slot preempts one
sequence. After `max_num_seqs` claims the head of the queue goes first, so nobody starves.

**How soon the first token comes.** Let B = max_num_batched_tokens, b = B - max_num_seqs > 0, and x a sequence of P
prompt tokens whose tenant got no more than any that waits, has no other prompt to compute, and is within its share with
it; let the oldest running sequence, which is never preempted, leave room for it. Then x starts in one of the next T
steps, and its first token comes at most  T (P + 2 B) / b + 1  steps later. If P and what other tenants lack of prompts
under way are at most b together, and nobody else claims in the same step, it comes with the very next step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.core.kv_manager import KVManager
from penstock.core.sequence import Sequence, Status
from penstock.core.sequence_table import SequenceTable
from penstock.request import Request


@dataclass(frozen=True, slots=True)
class Claim:
    """A waiting sequence that starts now, and the running ones that are preempted for it."""

    seq: Sequence
    num_slots: int
    """How many its tenant may still take: for it, and for siblings."""
    victims: list[Sequence]
    donor: Sequence | None
    """A running sequence that gives up slots which it keeps for siblings, as many as lack."""


class Shares:
    """Finds claims, and whom a running sequence preempts that lacks a block."""

    def __init__(self, kv: KVManager, sequences: SequenceTable, max_num_seqs: int) -> None:
        self._kv = kv
        self._sequences = sequences
        self._queue = sequences.queue
        self._max_num_seqs = max_num_seqs

    def claim(self, num_tokens: int, spared: Request | None) -> Claim | None:
        """The next claim; None if there is none.

        Args:
            num_tokens: how many prompt tokens a step computes. A tenant that has as many to compute claims nothing.
            spared: whose sequences are preempted only if no others can be.
        """
        claimants = list(self._queue.claimants())[::-1]  # of equals, those that came last go first
        if not claimants:
            return None
        holdings = self._holdings()
        if len(holdings) < 2:
            return None
        claimants.sort(key=lambda seq: _num_slots(holdings[self._queue.tenant(seq)]))
        for seq in claimants:
            held = holdings[self._queue.tenant(seq)]
            slots_left = self._slot_share(holdings) - _num_slots(held)
            if seq.min_slots <= slots_left and _num_lacking(held) < num_tokens:
                donor = self._donor(seq, holdings)
                victims = self._victims(seq, donor, holdings, spared)
                if victims is not None:
                    return Claim(seq, slots_left, victims, donor)
        return None

    def victim_for(self, seq: Sequence, spared: Request | None) -> Sequence:
        """Whom to preempt, as a running sequence lacks a block; perhaps itself.

        Someone of the tenant that is most above its share of blocks, of the sequence's own tenant only it and those
        after it in order; if there is nobody above, whoever comes after it. The first in order is never chosen.
        """
        running, oldest = self._sequences.running, self._sequences.running[0]
        after = [one for one in running[running.index(seq) :] if one is not oldest and one.status is Status.RUNNING]
        holdings, own = self._holdings(), self._queue.tenant(seq)
        for name in self._above_blocks(holdings) if len(holdings) > 1 else ():
            candidates = [one for one in holdings[name] if (one in after if name == own else one is not oldest)]
            if candidates:
                return _least_work(candidates, spared)
        assert after, f"the pool cannot hold {seq} alone"
        return _least_work(after, spared)

    def _holdings(self) -> dict[str, list[Sequence]]:
        """The running sequences of each tenant that has any, and of those that wait."""
        holdings: dict[str, list[Sequence]] = {name: [] for name in self._queue.waiting_tenants()}
        for seq in self._sequences.running:
            if seq.status is Status.RUNNING:
                holdings.setdefault(self._queue.tenant(seq), []).append(seq)
        return holdings

    def _donor(self, seq: Sequence, holdings: dict[str, list[Sequence]]) -> Sequence | None:
        """A sequence of the tenants above their share that keeps as many slots for siblings as a waiting one lacks."""
        lacking = seq.min_slots - self._sequences.num_free_slots
        if lacking <= 0:
            return None
        above = (one for name in self._above_slots(holdings) for one in holdings[name])
        return next((one for one in above if one.num_slots - one.min_slots >= lacking), None)

    def _victims(
        self, seq: Sequence, donor: Sequence | None, holdings: dict[str, list[Sequence]], spared: Request | None
    ) -> list[Sequence] | None:
        """Whom to preempt so that a waiting sequence can start; None if that does not suffice."""
        left = {name: held[:] for name, held in holdings.items()}
        own = holdings[self._queue.tenant(seq)]
        within_share = _num_blocks(own) + self._kv.blocks_for(len(seq.tokens)) <= self._block_share(holdings)
        victims: list[Sequence] = []
        free = self._sequences.num_free_slots if donor is None else seq.min_slots
        while True:
            reserve = self._max_num_seqs - free
            if free < seq.min_slots:
                above = self._above_slots(left)
            elif not self._kv.missing(seq, reserve, victims):
                return victims
            else:
                above = self._above_blocks(left) if within_share else []
            victim = self._take(left, above, donor, spared)
            if victim is None:
                return None
            victims.append(victim)
            free += victim.num_slots

    def _take(
        self, left: dict[str, list[Sequence]], above: Iterable[str], donor: Sequence | None, spared: Request | None
    ) -> Sequence | None:
        """Take a sequence that may be preempted out of the first of these tenants that has one."""
        safe = (self._sequences.running[0], donor)
        for name in above:
            candidates = [seq for seq in left[name] if seq not in safe]
            if candidates:
                victim = _least_work(candidates, spared)
                left[name].remove(victim)
                return victim
        return None

    def _slot_share(self, holdings: dict[str, list[Sequence]]) -> int:
        return max(1, self._max_num_seqs // len(holdings))

    def _block_share(self, holdings: dict[str, list[Sequence]]) -> int:
        return self._kv.pool.num_blocks // len(holdings)

    def _above_slots(self, holdings: dict[str, list[Sequence]]) -> list[str]:
        return _above(holdings, _num_slots, self._slot_share(holdings))

    def _above_blocks(self, holdings: dict[str, list[Sequence]]) -> list[str]:
        return _above(holdings, _num_blocks, self._block_share(holdings))


def _above(holdings: dict[str, list[Sequence]], measure: Callable[[Iterable[Sequence]], int], share: int) -> list[str]:
    """The tenants that hold more than the share, the one that holds most first."""
    held = {name: measure(sequences) for name, sequences in holdings.items()}
    return sorted((name for name in held if held[name] > share), key=lambda name: -held[name])


def _num_slots(sequences: Iterable[Sequence]) -> int:
    return sum(seq.num_slots for seq in sequences)


def _num_blocks(sequences: Iterable[Sequence]) -> int:
    return len({block for seq in sequences for block in seq.block_table})


def _num_lacking(sequences: Iterable[Sequence]) -> int:
    """Tokens of prompts and of preempted answers that are to be computed."""
    return sum(len(seq.tokens) - seq.num_computed - 1 for seq in sequences)


def _least_work(candidates: list[Sequence], spared: Request | None) -> Sequence:
    """The sequence that loses least by being preempted, the last one of several."""
    others = [seq for seq in candidates if seq.request is not spared]
    return min(reversed(others or candidates), key=lambda seq: seq.num_computed)
