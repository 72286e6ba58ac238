"""Fairness between tenants, whatever they request: the order of the queue, and shares of slots and KV blocks."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from penstock.api.request import Request
from penstock.core.kv_manager import KVManager
from penstock.core.policies import OrderedQueue, OrderKey, QueuePolicy, by_arrival, by_priority
from penstock.core.sequence import NOT_YET, Sequence, Status
from penstock.core.sequence_table import SequenceTable
from penstock.dataclass import dataclass

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2
"""Service units per prompt token on its first computation, and per generated token."""

_NOBODY = -1

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's counter."""

    name: str
    counter: int = 0
    joined: int = _NOBODY
    """Order in which it began to wait; `_NOBODY` while no request of it waits."""


class TenantCounters:
    """The counters of service of `FairQueue`, and the waiting tenant that has the smallest.

    A tenant that begins to wait starts no lower than the lowest counter among those already waiting, so an idle tenant
    accumulates no credit; and when no request waits, all debts are cleared.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, _Tenant] = {}
        self._active: list[tuple[int, int, _Tenant]] = []  # heap of (lower bound of its counter, joined, tenant)
        self._num_joined = 0
        self._highest = 0  # of all counters

    def __len__(self) -> int:
        """The number of tenants that have ever waited or been charged."""
        return len(self._tenants)

    @property
    def waiting(self) -> Iterable[str]:
        """The waiting tenants."""
        return self._waiting.keys()

    def counter(self, name: str) -> int:
        """The tenant's counter, comparable among waiting tenants."""
        return self._tenants[name].counter if name in self._tenants else 0

    def join(self, name: str) -> None:
        """Record that a tenant waits; ignored if it does already."""
        if name in self._waiting:
            return
        tenant = self._tenants.setdefault(name, _Tenant(name))
        first = self._first_tenant()
        # Idle time earns no credit: otherwise a tenant that comes back would keep all others waiting.
        tenant.counter = max(tenant.counter, self._highest if first is None else first.counter)
        tenant.joined = self._num_joined
        self._num_joined += 1
        if len(self._active) > 2 * len(self._tenants) + 8:  # bound the number of stale entries
            self._active = [(t.counter, t.joined, t) for t in self._waiting.values()]
            heapq.heapify(self._active)
        heapq.heappush(self._active, (tenant.counter, tenant.joined, tenant))
        self._waiting[name] = tenant

    def leave(self, name: str) -> None:
        """Record that no request of a tenant waits any more."""
        self._waiting.pop(name).joined = _NOBODY

    def charge(self, name: str, amount: int) -> None:
        """Add to the counter of a tenant, which may never have waited."""
        tenant = self._tenants.setdefault(name, _Tenant(name))
        tenant.counter += amount
        if tenant.counter > self._highest:
            self._highest = tenant.counter

    def first(self) -> str | None:
        """The waiting tenant with the smallest counter; ties go to the one waiting longest."""
        tenant = self._first_tenant()
        return None if tenant is None else tenant.name

    def _first_tenant(self) -> _Tenant | None:
        while self._active:
            counter, joined, tenant = self._active[0]
            if joined != tenant.joined:  # stale: it left since, and may have joined again
                heapq.heappop(self._active)
            elif counter != tenant.counter:
                heapq.heapreplace(self._active, (tenant.counter, joined, tenant))
            else:
                return tenant
        return None

    def in_order(self, waiting: Callable[[str], Iterator[T]], prompt_length: Callable[[T], int]) -> Iterator[T]:
        """Yield the requests of all tenants in the order of being served, as far as prompts decide it.

        Args:
            waiting: yields a tenant's requests in order.
        """
        heap = [(t.counter, t.joined, waiting(t.name)) for t in self._waiting.values()]
        heapq.heapify(heap)
        while heap:
            counter, joined, requests = heap[0]
            request = next(requests, None)
            if request is None:
                heapq.heappop(heap)
            else:
                yield request
                heapq.heapreplace(heap, (counter + PROMPT_WEIGHT * prompt_length(request), joined, requests))


class FairQueue:
    """The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).

    Each tenant has a counter of its service: `PROMPT_WEIGHT` per computed prompt token, `ANSWER_WEIGHT` per generated
    token. Encoding an image is charged like prompt tokens of the same cost, to the tenant for which it is encoded. The
    next sequence admitted belongs to the waiting tenant with the smallest counter; within a tenant, the order is
    priority and arrival. `TenantCounters` has the rule for idle tenants.

    Once admitted, a sequence keeps its place in the order of first admissions: after preemption it returns before all
    sequences that never ran, and is not charged again for recomputation.

    **Bound on service.** Let U = max_num_seqs * (PROMPT_WEIGHT * longest prompt + ANSWER_WEIGHT * longest answer); the
    cost of a prompt's images counts as part of its length.
    While a tenant waits, no other tenant's counter exceeds its own by more than U: at the other's last admission its
    counter was the smallest, and its running sequences can add at most U. Therefore two tenants that both wait
    throughout an interval get service that differs by at most 2 U in it.

    **Bound on waiting.** A request of a tenant without debt (one that was idle) is overtaken by at most one request of
    each other tenant. `claimants` may also overtake the queue within their share, at the cost of tenants above theirs;
    `Shares` states when, and how soon the first token comes. At most `max_num_seqs` claims overtake the head of the
    queue, so such a request, of any size, ends after at most  n * (cost + 2 * max_num_seqs * longest)  steps, summed
    over the requests running when it arrived, those that overtake it in the queue, and itself.
    """

    def __init__(self) -> None:
        self._counters = TenantCounters()
        self._queues: dict[str, OrderedQueue] = defaultdict(lambda: OrderedQueue(by_priority))  # by tenant, never ran
        self._returning = OrderedQueue(self.order_key)
        self._num_waiting = 0
        self._num_turns = 0

    def order_key(self, seq: Sequence) -> OrderKey:
        return (seq.turn, seq.ordinal, seq.index)

    def tenant(self, seq: Sequence) -> str:
        return seq.request.tenant

    def counter(self, tenant: str) -> int:
        """The tenant's virtual counter, comparable among waiting tenants."""
        return self._counters.counter(tenant)

    def push(self, seq: Sequence) -> None:
        self._num_waiting += 1
        if seq.turn != NOT_YET:
            self._returning.push(seq)
            return
        self._counters.join(seq.request.tenant)
        self._queues[seq.request.tenant].push(seq)

    def waiting_tenants(self) -> Iterable[str]:
        return {*self._first_returning(), *self._counters.waiting}

    def _first_returning(self) -> dict[str, Sequence]:
        """The first preempted sequence of each tenant."""
        firsts: dict[str, Sequence] = {}
        for seq in self._returning.in_order():
            firsts.setdefault(seq.request.tenant, seq)
        return firsts

    def claimants(self) -> Iterable[Sequence]:
        """Each tenant's first preempted sequence, and the first sequence of the tenants with the smallest counter."""
        counters = self._counters
        if len(counters) < 2:
            return []
        returning, first = self._first_returning(), counters.first()
        firsts = list(returning.values())
        if first is not None:
            smallest = counters.counter(first)
            least = [name for name in counters.waiting if counters.counter(name) == smallest and name not in returning]
            firsts += [seq for name in least if (seq := self._queues[name].peek()) is not None]
        return firsts

    def peek(self) -> Sequence | None:
        returning = self._returning.peek()
        if returning is not None:
            return returning
        first = self._counters.first()
        return None if first is None else self._queues[first].peek()

    def admit(self, seq: Sequence) -> None:
        is_new = seq.turn == NOT_YET
        self.remove(seq)
        if is_new:
            seq.turn = self._num_turns
            seq.num_charged = seq.num_computed
            self._num_turns += 1

    def remove(self, seq: Sequence) -> None:
        self._num_waiting -= 1
        if seq.turn != NOT_YET:
            self._returning.remove(seq)
            return
        queue = self._queues[seq.request.tenant]
        queue.remove(seq)
        if not len(queue):
            del self._queues[seq.request.tenant]
            self._counters.leave(seq.request.tenant)

    def prefilled(self, seq: Sequence, count: int) -> None:
        self._charge_prompt(seq, seq.num_computed + count)

    def encoded(self, seq: Sequence, cost: int) -> None:
        self._counters.charge(seq.request.tenant, PROMPT_WEIGHT * cost)

    def served(self, sequences: Iterable[Sequence], count: int = 1) -> None:
        for seq in sequences:
            if seq.num_charged < seq.num_prompt_tokens:  # its last token is computed like a decode's
                self._charge_prompt(seq, seq.num_prompt_tokens)
            self._counters.charge(seq.request.tenant, ANSWER_WEIGHT * count)

    def _charge_prompt(self, seq: Sequence, end: int) -> None:
        """Charge for the prompt tokens before `end` that have not been charged."""
        count = min(end, seq.num_prompt_tokens) - seq.num_charged
        # What is computed again after a preemption is not charged again.
        if count > 0:
            seq.num_charged += count
            self._counters.charge(seq.request.tenant, PROMPT_WEIGHT * count)

    def in_order(self) -> Iterator[Sequence]:
        """The order in which they would be admitted now with an empty prefix cache."""
        yield from self._returning.in_order()
        yield from self._counters.in_order(lambda name: self._queues[name].in_order(), lambda seq: len(seq.tokens))

    def __len__(self) -> int:
        return self._num_waiting


QUEUE_POLICIES: dict[str, Callable[[], QueuePolicy]] = {
    "fair": FairQueue,
    "fcfs": lambda: OrderedQueue(by_arrival),
    "priority": lambda: OrderedQueue(by_priority),
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A waiting sequence to start now, and the running ones to preempt for it."""

    seq: Sequence
    num_slots: int
    """Slots that its tenant may still take, for it and its siblings."""
    victims: list[Sequence]
    donor: Sequence | None
    """A running sequence that returns slots reserved for its siblings, as many as are missing."""


class Shares:
    """Equal shares of slots and KV blocks between tenants: decides who overtakes the queue, and at whose cost.

    With T tenants that have running or waiting sequences, each has a share of `max(1, max_num_seqs // T)` slots and
    `num_blocks // T` blocks. Nothing is reserved: a tenant may exceed its share as long as no other asks for its own.

    **A claim.** A waiting sequence starts at once, before the head of the queue and before other tenants' prompts, if
    the queue policy names it (`QueuePolicy.claimants`) and its tenant stays within its share. Missing slots or blocks
    are taken from the tenants most above their share: first slots reserved for siblings that do not run yet, then those
    of running sequences, which are preempted, least lost work first and no more than necessary. If that does not
    suffice, no sequence is preempted.

    **No thrashing.** A tenant within its share loses nothing to a claim, and the claiming tenant stays within its
    share, so two tenants cannot take the same slot from each other in turn. A claim for a slot preempts one sequence.
    After `max_num_seqs` claims the head of the queue goes first, so none starves.

    **Time to first token.** Let B = max_num_batched_tokens, b = B - max_num_seqs > 0, and x a sequence of P prompt
    tokens whose tenant had no more service than any waiting tenant, has no other prompt to compute, and stays within
    its share with x; let the oldest running sequence, which is never preempted, leave room for it. Then x starts in one
    of the next T steps, and its first token comes at most T (P + 2 B) / b + 1 steps later. If P and the remaining
    prompt tokens of other tenants are at most b together, and no other tenant claims in the same step, it comes with
    the very next step.
    """

    def __init__(self, kv: KVManager, sequences: SequenceTable, max_num_seqs: int) -> None:
        self._kv = kv
        self._sequences = sequences
        self._queue = sequences.queue
        self._max_num_seqs = max_num_seqs

    def claim(self, num_tokens: int, spared: Request | None) -> Claim | None:
        """The next claim; None if there is none.

        Args:
            num_tokens: prompt tokens a step computes. A tenant with this many left to compute cannot claim.
            spared: request whose sequences are preempted only if no others can be.
        """
        claimants = list(self._queue.claimants())[::-1]  # among equals, the latest first
        if not claimants:
            return None
        holdings = self._holdings()
        if len(holdings) < 2:
            return None
        # Whoever holds least first: a tenant without any slot before one that has some.
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

    def victim_for(self, seq: Sequence, spared: Request | None) -> Sequence | None:
        """The sequence to preempt when a running sequence lacks a block; may be itself; None if it runs alone.

        It belongs to the tenant most above its share of blocks; within the sequence's own tenant, it is the sequence
        itself or one after it in order. If no tenant is above its share, it is any sequence after it. The first in
        order is never chosen.
        """
        running, oldest = self._sequences.running, self._sequences.running[0]
        after = [
            other for other in running[running.index(seq) :] if other is not oldest and other.status is Status.RUNNING
        ]
        holdings, own = self._holdings(), self._queue.tenant(seq)
        for name in self._above_blocks(holdings) if len(holdings) > 1 else ():
            candidates = [other for other in holdings[name] if (other in after if name == own else other is not oldest)]
            if candidates:
                return _least_work(candidates, spared)
        return _least_work(after, spared) if after else None

    def _holdings(self) -> dict[str, list[Sequence]]:
        """Running sequences of each tenant that has running or waiting ones."""
        holdings: dict[str, list[Sequence]] = {name: [] for name in self._queue.waiting_tenants()}
        for seq in self._sequences.running:
            if seq.status is Status.RUNNING:
                holdings.setdefault(self._queue.tenant(seq), []).append(seq)
        return holdings

    def _donor(self, seq: Sequence, holdings: dict[str, list[Sequence]]) -> Sequence | None:
        """A sequence of a tenant above its share with at least the missing number of slots reserved for siblings."""
        lacking = seq.min_slots - self._sequences.num_free_slots
        if lacking <= 0:
            return None
        above = (candidate for name in self._above_slots(holdings) for candidate in holdings[name])
        return next((candidate for candidate in above if candidate.num_slots - candidate.min_slots >= lacking), None)

    def _victims(
        self, seq: Sequence, donor: Sequence | None, holdings: dict[str, list[Sequence]], spared: Request | None
    ) -> list[Sequence] | None:
        """Sequences to preempt so that a waiting sequence can start; None if that does not suffice."""
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
        """Remove and return a preemptable sequence of the first of these tenants that has one."""
        # The oldest is never preempted, so it ends; the donor gave up slots for this claim already.
        safe = (*self._sequences.running[:1], donor)
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
    """Tenants above the share, the largest holder first."""
    held = {name: measure(sequences) for name, sequences in holdings.items()}
    return sorted((name for name in held if held[name] > share), key=lambda name: -held[name])


def _num_slots(sequences: Iterable[Sequence]) -> int:
    return sum(seq.num_slots for seq in sequences)


def _num_blocks(sequences: Iterable[Sequence]) -> int:
    return len({block for seq in sequences for block in seq.tables[0].held})


def _num_lacking(sequences: Iterable[Sequence]) -> int:
    """Tokens of prompts and of preempted answers that remain to be computed."""
    return sum(len(seq.tokens) - seq.num_computed - 1 for seq in sequences)


def _least_work(candidates: list[Sequence], spared: Request | None) -> Sequence:
    """The sequence that loses the least work by preemption, the last one of several."""
    others = [seq for seq in candidates if seq.request is not spared]
    return min(reversed(others or candidates), key=lambda seq: seq.num_computed)
