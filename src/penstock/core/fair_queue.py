"""A queue that shares the engine between tenants, whatever each of them asks for."""

import heapq
from collections.abc import Callable, Iterable, Iterator

from penstock.core.policies import OrderedQueue, OrderKey, QueuePolicy, by_arrival, by_priority
from penstock.core.sequence import NOT_YET, Sequence

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2
"""What a tenant is charged for a prompt token that is computed, and for a token that is generated."""

_NOBODY = -1


class _Tenant:
    """One account: what it was charged, and what waits on it."""

    __slots__ = ("counter", "joined", "waiting")

    def __init__(self) -> None:
        self.counter = 0
        self.joined = _NOBODY  # which one it was to begin to wait; _NOBODY while nothing of it waits
        self.waiting = OrderedQueue(by_priority)


class FairQueue:
    """The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).

    Each tenant has a counter of the service it got: `PROMPT_WEIGHT` a prompt token, charged at admission and less what
    the prefix cache held; `ANSWER_WEIGHT` a generated token. The next one admitted is of the waiting tenant with the
    smallest counter; of one tenant's, by priority and arrival. A tenant that begins to wait starts no lower than the
    lowest of those that wait already, so nobody saves up by being quiet; and when nobody waits, debts are forgiven.

    From its first admission on a sequence is served in the order of these admissions: preempted, it returns before
    all that never ran, and is not charged again for what it recomputes.

    **The bound.** Let U = PROMPT_WEIGHT * longest prompt + ANSWER_WEIGHT * max_num_seqs * longest answer. While a
    tenant waits, no other tenant's counter is more than U above its own: at its last admission the other's counter was
    the smallest, and U is the most that this admission and all that ran can add. Therefore

    - two tenants that both wait throughout an interval get service that differs by at most 2 U in it, and
    - a request of a tenant without debt, as one that was quiet has, is overtaken by at most one request of each other
      tenant: it waits for those admitted when it came and for these, never for a queue, however long that is. It ends
      after at most  sum over them and itself of  n * (cost + max_num_seqs * longest)  steps, as under `fcfs`.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._active: list[tuple[int, int, _Tenant]] = []  # heap of (a counter no larger than now, joined, tenant)
        self._returning = OrderedQueue(self.order_key)
        self._num_waiting = 0
        self._num_joined = 0
        self._num_turns = 0
        self._highest = 0  # of all counters

    def order_key(self, seq: Sequence) -> OrderKey:
        return (seq.turn, seq.ordinal, seq.index)

    def counter(self, tenant: str) -> int:
        """What the tenant is charged with, on a scale that is common to all that wait."""
        return self._tenants[tenant].counter if tenant in self._tenants else 0

    def push(self, seq: Sequence) -> None:
        self._num_waiting += 1
        if seq.turn != NOT_YET:
            self._returning.push(seq)
            return
        tenant = self._tenants.setdefault(seq.request.tenant, _Tenant())
        if tenant.joined == _NOBODY:
            self._join(tenant)
        tenant.waiting.push(seq)

    def _join(self, tenant: _Tenant) -> None:
        first = self._first()
        tenant.counter = max(tenant.counter, self._highest if first is None else first.counter)
        tenant.joined = self._num_joined
        self._num_joined += 1
        if len(self._active) > 2 * len(self._tenants) + 8:  # keep stale entries from piling up
            self._active = [(t.counter, t.joined, t) for t in self._waiting_tenants() if t is not tenant]
            heapq.heapify(self._active)
        heapq.heappush(self._active, (tenant.counter, tenant.joined, tenant))

    def _waiting_tenants(self) -> Iterator[_Tenant]:
        return (tenant for tenant in self._tenants.values() if tenant.joined != _NOBODY)

    def _first(self) -> _Tenant | None:
        """The waiting tenant with the smallest counter; among equals, the one that has waited longest."""
        while self._active:
            counter, joined, tenant = self._active[0]
            if joined != tenant.joined:  # it has left since, and perhaps joined again
                heapq.heappop(self._active)
            elif counter != tenant.counter:
                heapq.heapreplace(self._active, (tenant.counter, joined, tenant))
            else:
                return tenant
        return None

    def peek(self) -> Sequence | None:
        returning = self._returning.peek()
        if returning is not None:
            return returning
        first = self._first()
        return None if first is None else first.waiting.peek()

    def admit(self, seq: Sequence) -> None:
        is_new = seq.turn == NOT_YET
        self.remove(seq)
        if is_new:
            for one in (seq, *seq.siblings):
                one.turn = self._num_turns
            self._num_turns += 1
            self._charge(seq, PROMPT_WEIGHT * (len(seq.tokens) - seq.num_computed))

    def remove(self, seq: Sequence) -> None:
        self._num_waiting -= 1
        if seq.turn != NOT_YET:
            self._returning.remove(seq)
            return
        tenant = self._tenants[seq.request.tenant]
        tenant.waiting.remove(seq)
        if not len(tenant.waiting):
            tenant.joined = _NOBODY

    def served(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            self._charge(seq, ANSWER_WEIGHT)

    def _charge(self, seq: Sequence, amount: int) -> None:
        tenant = self._tenants[seq.request.tenant]
        tenant.counter += amount
        if tenant.counter > self._highest:
            self._highest = tenant.counter

    def in_order(self) -> Iterator[Sequence]:
        """The order in which they would be admitted if that happened now, with nothing in the prefix cache."""
        yield from self._returning.in_order()
        heap = [(t.counter, t.joined, t.waiting.in_order()) for t in self._waiting_tenants()]
        heapq.heapify(heap)
        while heap:
            counter, joined, sequences = heap[0]
            seq = next(sequences, None)
            if seq is None:
                heapq.heappop(heap)
            else:
                yield seq
                heapq.heapreplace(heap, (counter + PROMPT_WEIGHT * len(seq.tokens), joined, sequences))

    def __len__(self) -> int:
        return self._num_waiting


QUEUE_POLICIES: dict[str, Callable[[], QueuePolicy]] = {
    "fair": FairQueue,
    "fcfs": lambda: OrderedQueue(by_arrival),
    "priority": lambda: OrderedQueue(by_priority),
}
