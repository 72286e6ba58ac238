"""Collaborators of the scheduler: the order of requests (queue policies), the number that may join (admission
policies), and the division of a step's tokens among tenants' prompts (`PrefillOrder`).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Protocol

from penstock.core.sequence import Sequence
from penstock.dataclass import dataclass

OrderKey = tuple[int, ...]


class QueuePolicy(Protocol):
    """The waiting sequences in the order of service."""

    def order_key(self, seq: Sequence) -> OrderKey:
        """Order in which running sequences get blocks, smaller first. Fixed while they run."""

    def tenant(self, seq: Sequence) -> str:
        """Tenant for sharing slots, blocks and step tokens; always "" if the policy does not share."""

    def waiting_tenants(self) -> Iterable[str]: ...

    def claimants(self) -> Iterable[Sequence]:
        """Waiting sequences that may overtake the head of the queue if their tenant is within its share."""

    def push(self, seq: Sequence) -> None: ...

    def peek(self) -> Sequence | None: ...

    def admit(self, seq: Sequence) -> None:
        """Remove the queue's head, or a claimant, which starts with `num_computed` tokens from the prefix cache."""

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that ends without having run."""

    def prefilled(self, seq: Sequence, count: int) -> None:
        """Record that the step being built computes `count` missing tokens of a running sequence."""

    def encoded(self, seq: Sequence, cost: int) -> None:
        """Record that the step being built encodes an image of a running sequence for the first time, at the cost of
        so many prompt tokens.
        """

    def served(self, sequences: Iterable[Sequence], count: int = 1) -> None:
        """Record that each of these running sequences got `count` tokens."""

    def in_order(self) -> Iterator[Sequence]: ...

    def __len__(self) -> int: ...


class OrderedQueue:
    """A queue ordered by a fixed key. Each operation takes at most logarithmic time."""

    def __init__(self, order_key: Callable[[Sequence], OrderKey]) -> None:
        self.order_key = order_key
        self._heap: list[tuple[OrderKey, Sequence]] = []
        self._waiting: set[Sequence] = set()  # heap entries that are not in here are stale

    def push(self, seq: Sequence) -> None:
        assert seq not in self._waiting, f"{seq} waits already"
        self._waiting.add(seq)
        heapq.heappush(self._heap, (self.order_key(seq), seq))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def tenant(self, seq: Sequence) -> str:
        return ""

    def waiting_tenants(self) -> Iterable[str]:
        return ()

    def claimants(self) -> Iterable[Sequence]:
        return ()

    def admit(self, seq: Sequence) -> None:
        self.remove(seq)

    def prefilled(self, seq: Sequence, count: int) -> None:
        return None

    def encoded(self, seq: Sequence, cost: int) -> None:
        return None

    def served(self, sequences: Iterable[Sequence], count: int = 1) -> None:
        return None

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        if len(self._heap) > 2 * len(self._waiting) + 8:  # bound the number of stale entries
            self._heap = [(self.order_key(s), s) for s in self._waiting]
            heapq.heapify(self._heap)

    def in_order(self) -> Iterator[Sequence]:
        yield from sorted(self._waiting, key=self.order_key)  # sorted lazily, on the first request

    def __len__(self) -> int:
        return len(self._waiting)


def by_arrival(seq: Sequence) -> OrderKey:
    """First come, first served. A preempted sequence keeps its place."""
    return (seq.ordinal, seq.index)


def by_priority(seq: Sequence) -> OrderKey:
    """The lowest `priority` number first; ties are first come, first served."""
    return (seq.request.priority, seq.ordinal, seq.index)


@dataclass(frozen=True, slots=True)
class Load:
    """The input of an admission policy while a step is being built."""

    num_running: int
    running_tokens: int
    """Sum of prompt and `max_tokens` over the running sequences."""
    prefilling_tokens: int
    """Prompt tokens of running sequences already in this step."""


class AdmissionPolicy(Protocol):
    """Limits the waiting sequences that may join a step, and its prompt tokens."""

    max_prefill_tokens: int | None

    def limit(self, waiting: Iterable[Sequence], load: Load) -> int:
        """Number of waiting sequences and siblings that may join now, in order."""

    def after_step(self, *, admitted: bool) -> None:
        """Called after a step was built, with or without new sequences."""


class TgiAdmission:
    """The batching controls of Hugging Face's TGI, as defined by its v3 backend's queue.

    - `max_batch_prefill_tokens`, rounded up to whole blocks, bounds the prompt tokens of a step; a prompt that does not
      fit joins with a chunk.
    - `max_batch_total_tokens` bounds the worst case: the sum of prompt and `max_tokens` over the running sequences.
    - While a batch runs, new sequences join only if at least `floor(running * waiting_served_ratio)` of them can join
      together, so that decodes are not interrupted for a few;
    - after `max_waiting_tokens` steps without a new sequence, any number may join.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_batch_prefill_tokens: int | None,
        max_batch_total_tokens: int | None,
        waiting_served_ratio: float,
        max_waiting_tokens: int,
    ) -> None:
        self.max_prefill_tokens = max_batch_prefill_tokens
        if max_batch_prefill_tokens is not None:
            self.max_prefill_tokens = -(-max_batch_prefill_tokens // block_size) * block_size
        self._max_total = max_batch_total_tokens
        self._ratio = waiting_served_ratio
        self._max_waiting = max_waiting_tokens
        self._steps_since_join = 1

    def limit(self, waiting: Iterable[Sequence], load: Load) -> int:
        least = 1
        if load.num_running and self._steps_since_join < self._max_waiting:
            least = int(load.num_running * self._ratio)
        fitting = self._count_fitting(waiting, load)
        return fitting if fitting >= least else 0

    def _count_fitting(self, waiting: Iterable[Sequence], load: Load) -> int:
        total, prefill, count = load.running_tokens, load.prefilling_tokens, 0
        for seq in waiting:
            if self.max_prefill_tokens is not None and prefill >= self.max_prefill_tokens:
                break
            num_slots = fitting = 1 + len(seq.siblings)
            if self._max_total is not None:
                fitting = min(num_slots, (self._max_total - total) // seq.max_length)
            if fitting < seq.min_slots:
                break
            total += seq.max_length * fitting
            prefill += len(seq.tokens)
            count += fitting
            if fitting < num_slots:
                break
        return count

    def after_step(self, *, admitted: bool) -> None:
        self._steps_since_join = 1 if admitted else self._steps_since_join + 1


def worst_case_tokens(seq: Sequence) -> int:
    """Sum of prompt and `max_tokens` over a running sequence and those that will fork from it."""
    return seq.max_length * seq.num_slots


class PrefillOrder:
    """Fair queueing of prompt tokens (Goyal, Vin and Cheng, "Start-time Fair Queueing", 1996), with a clock per tenant.

    A tenant's clock counts its computed prompt tokens. The lowest clock goes first; clocks ahead by at most a step's
    tokens count as equal. Among equals, the tenant with the fewest running sequences goes first, then the one with the
    fewest tokens to compute: so a small prompt is not split. A tenant that starts computing prompts starts no lower
    than the lowest of the others, and keeps its lead.
    """

    def __init__(self, queue: QueuePolicy, step_tokens: int) -> None:
        self._queue = queue
        self._step_tokens = step_tokens
        self._clocks: dict[str, int] = {}
        self._active: set[str] = set()  # tenants with prompts to compute in the latest step

    def sort(self, prompts: list[Sequence], running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences that lack more than one token, in the order in which a step serves them."""
        by_tenant: dict[str, list[Sequence]] = {}
        for seq in prompts:
            by_tenant.setdefault(self._queue.tenant(seq), []).append(seq)
        self._begin(by_tenant.keys())
        if len(by_tenant) < 2:
            return prompts
        equal = min(self._clocks[name] for name in by_tenant) + self._step_tokens
        num_running = Counter(map(self._queue.tenant, running))

        def place(name: str) -> tuple[int, int, int]:
            lacking = sum(len(seq.tokens) - seq.num_computed for seq in by_tenant[name])
            return max(self._clocks[name], equal), num_running[name], lacking

        return [seq for name in sorted(by_tenant, key=place) for seq in by_tenant[name]]

    def _begin(self, names: Set[str]) -> None:
        """Record the tenants with prompts to compute in this step."""
        lowest = min((self._clocks[name] for name in self._active & names), default=None)
        if lowest is None:  # no tenant shared a step with another: no debts
            self._clocks, lowest = {}, 0
        ahead = {name: clock for name, clock in self._clocks.items() if clock > lowest}
        self._clocks = ahead | {name: max(self._clocks.get(name, 0), lowest) for name in names}
        self._active = set(names)

    def computed(self, seq: Sequence, count: int) -> None:
        """Record that the step computes `count` tokens of the sequence."""
        name = self._queue.tenant(seq)
        if name in self._clocks:
            self._clocks[name] += count
