"""A queue that shares the engine between tenants, whatever each of them asks for."""

import heapq
from collections.abc import Callable, Iterable, Iterator

from penstock.core.policies import OrderedQueue, OrderKey, QueuePolicy, by_arrival, by_priority
from penstock.core.sequence import NOT_YET, Sequence

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2
"""What a tenant is charged for a prompt token that is computed the first time, and for a token that is generated."""

_NOBODY = -1


class _Tenant:
    """One account: what it was charged, and what waits on it."""

    __slots__ = ("counter", "joined", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.counter = 0
        self.joined = _NOBODY  # which one it was to begin to wait; _NOBODY while nothing of it waits
        self.waiting = OrderedQueue(by_priority)


class FairQueue:
    """The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).

    Each tenant has a counter of the service it got: `PROMPT_WEIGHT` a prompt token that was computed, `ANSWER_WEIGHT` a
    generated token. The next sequence admitted is of the waiting tenant with the smallest counter; of one tenant's, by
    priority and arrival. A tenant that begins to wait starts no lower than the lowest of those that wait already, so
    nobody saves up by being quiet; and when nobody waits, debts are forgiven.

    From its first admission on a sequence is served in the order of these admissions: preempted, it returns before
    all that never ran, and is not charged again for what it recomputes.

    **The bound on service.** Let U = max_num_seqs * (PROMPT_WEIGHT * longest prompt + ANSWER_WEIGHT * longest answer).
    While a tenant waits, no other tenant's counter is more than U above its own: at its last admission the other's
    counter was the smallest, and U is the most that all it runs can add. Therefore two tenants that both wait
    throughout an interval get service that differs by at most 2 U in it.

    **The bound on waiting.** A request of a tenant without debt, as one that was quiet has, is overtaken by at most one
    request of each other tenant. `claimants` may besides overtake the queue within their share, at the cost of tenants
    above theirs; `core/shares.py` says when, and how soon the first token comes. At most `max_num_seqs` claims overtake
    the head of the queue, so such a request, of whatever size, ends after at most  n * (cost + 2 * max_num_seqs *
    longest)  steps, summed over those that ran when it came, those that overtake it in the queue, and itself.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, _Tenant] = {}  # tenants with a waiting request that never ran
        self._active: list[tuple[int, int, _Tenant]] = []  # heap of (a counter no larger than now, joined, tenant)
        self._returning = OrderedQueue(self.order_key)
        self._num_waiting = 0
        self._num_joined = 0
        self._num_turns = 0
        self._highest = 0  # of all counters

    def order_key(self, seq: Sequence) -> OrderKey:
        return (seq.turn, seq.ordinal, seq.index)

    def tenant(self, seq: Sequence) -> str:
        return seq.request.tenant

    def counter(self, tenant: str) -> int:
        """What the tenant is charged with, on a scale that is common to all that wait."""
        return self._tenants[tenant].counter if tenant in self._tenants else 0

    def push(self, seq: Sequence) -> None:
        self._num_waiting += 1
        if seq.turn != NOT_YET:
            self._returning.push(seq)
            return
        name = seq.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name)
        if tenant.joined == _NOBODY:
            self._join(tenant)
        tenant.waiting.push(seq)

    def _join(self, tenant: _Tenant) -> None:
        first = self._first()
        tenant.counter = max(tenant.counter, self._highest if first is None else first.counter)
        tenant.joined = self._num_joined
        self._num_joined += 1
        if len(self._active) > 2 * len(self._tenants) + 8:  # keep stale entries from piling up
            self._active = [(t.counter, t.joined, t) for t in self._waiting.values()]
            heapq.heapify(self._active)
        heapq.heappush(self._active, (tenant.counter, tenant.joined, tenant))
        self._waiting[tenant.name] = tenant

    def waiting_tenants(self) -> Iterable[str]:
        return {*self._first_returning(), *self._waiting}

    def _first_returning(self) -> dict[str, Sequence]:
        """Of each tenant the first of its sequences that were preempted."""
        firsts: dict[str, Sequence] = {}
        for seq in self._returning.in_order():
            firsts.setdefault(seq.request.tenant, seq)
        return firsts

    def claimants(self) -> Iterable[Sequence]:
        """Each tenant's first preempted sequence, and the first of those tenants whose counter is the smallest."""
        if len(self._tenants) < 2:
            return []
        returning, first = self._first_returning(), self._first()
        found = list(returning.values())
        if first is not None:
            least = [t for t in self._waiting.values() if t.counter == first.counter and t.name not in returning]
            found += [seq for tenant in least if (seq := tenant.waiting.peek()) is not None]
        return found

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
            seq.turn = self._num_turns
            seq.num_charged = seq.num_computed
            self._num_turns += 1

    def remove(self, seq: Sequence) -> None:
        self._num_waiting -= 1
        if seq.turn != NOT_YET:
            self._returning.remove(seq)
            return
        tenant = self._tenants[seq.request.tenant]
        tenant.waiting.remove(seq)
        if not len(tenant.waiting):
            tenant.joined = _NOBODY
            del self._waiting[tenant.name]

    def prefilled(self, seq: Sequence, count: int) -> None:
        self._charge_prompt(seq, seq.num_computed + count)

    def served(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if seq.num_charged < seq.num_prompt_tokens:  # its last token, which is computed as a decode's is
                self._charge_prompt(seq, seq.num_prompt_tokens)
            self._charge(seq, ANSWER_WEIGHT)

    def _charge_prompt(self, seq: Sequence, end: int) -> None:
        """Charge for the prompt's tokens before `end` that were not charged yet."""
        count = min(end, seq.num_prompt_tokens) - seq.num_charged
        if count > 0:
            seq.num_charged += count
            self._charge(seq, PROMPT_WEIGHT * count)

    def _charge(self, seq: Sequence, amount: int) -> None:
        tenant = self._tenants[seq.request.tenant]
        tenant.counter += amount
        if tenant.counter > self._highest:
            self._highest = tenant.counter

    def in_order(self) -> Iterator[Sequence]:
        """The order in which they would be admitted if that happened now, with nothing in the prefix cache."""
        yield from self._returning.in_order()
        heap = [(t.counter, t.joined, t.waiting.in_order()) for t in self._waiting.values()]
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
