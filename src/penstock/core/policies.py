"""Collaborators of the scheduler: which request is next (queue policies), how many may join (admission policies), and
how prompts of several tenants share a step's tokens (`PrefillOrder`).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Protocol

from penstock.core.sequence import Sequence

OrderKey = tuple[int, ...]


class QueuePolicy(Protocol):
    """The waiting sequences, in the order in which they are to be served."""

    def order_key(self, seq: Sequence) -> OrderKey:
        """The order in which running sequences get their blocks, smaller earlier. Fixed while they run."""

    def tenant(self, seq: Sequence) -> str:
        """Among whom slots, blocks and the step's tokens are shared; "" for all where the policy does not share."""

    def waiting_tenants(self) -> Iterable[str]: ...

    def claimants(self) -> Iterable[Sequence]:
        """Waiting sequences that may overtake the head of the queue if their tenant is within its share."""

    def push(self, seq: Sequence) -> None: ...

    def peek(self) -> Sequence | None: ...

    def admit(self, seq: Sequence) -> None:
        """The head of the queue, or a claimant, leaves it to run, with `num_computed` tokens from the prefix cache."""

    def remove(self, seq: Sequence) -> None:
        """A sequence leaves the queue without having run."""

    def prefilled(self, seq: Sequence, count: int) -> None:
        """`count` missing tokens of a running sequence are computed in the step being built."""

    def served(self, sequences: Iterable[Sequence], count: int = 1) -> None:
        """Each of these running sequences got `count` tokens."""

    def in_order(self) -> Iterator[Sequence]: ...

    def __len__(self) -> int: ...


class OrderedQueue:
    """A queue ordered by a fixed key. Each operation costs at most the logarithm of the queue's length."""

    def __init__(self, order_key: Callable[[Sequence], OrderKey]) -> None:
        self.order_key = order_key
        self._heap: list[tuple[OrderKey, Sequence]] = []
        self._waiting: set[Sequence] = set()  # an entry of the heap that is not in here is stale

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

    def served(self, sequences: Iterable[Sequence], count: int = 1) -> None:
        return None

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        if len(self._heap) > 2 * len(self._waiting) + 8:  # keep stale entries from piling up
            self._heap = [(self.order_key(s), s) for s in self._waiting]
            heapq.heapify(self._heap)

    def in_order(self) -> Iterator[Sequence]:
        yield from sorted(self._waiting, key=self.order_key)  # lazily, when the first is asked for

    def __len__(self) -> int:
        return len(self._waiting)


def by_arrival(seq: Sequence) -> OrderKey:
    """First come, first served. A preempted sequence keeps its place."""
    return (seq.ordinal, seq.index)


def by_priority(seq: Sequence) -> OrderKey:
    """The lowest `priority` number first; among equals, first come, first served."""
    return (seq.request.priority, seq.ordinal, seq.index)


@dataclass(frozen=True, slots=True)
class Load:
    """What an admission policy may look at, at the moment a step is put together."""

    num_running: int
    running_tokens: int
    """Prompt and `max_tokens`, added up over the running sequences."""
    prefilling_tokens: int
    """Prompt tokens of running sequences that are in this step already."""


class AdmissionPolicy(Protocol):
    """How many of the waiting sequences may join this step, and how many prompt tokens it computes."""

    max_prefill_tokens: int | None

    def limit(self, waiting: Iterable[Sequence], load: Load) -> int | None:
        """How many of the waiting sequences and their siblings may join now, in order; None for no limit."""

    def after_step(self, *, admitted: bool) -> None:
        """A step was put together, with new sequences or without."""


class AdmitAll:
    """Admits every sequence for which there is room."""

    max_prefill_tokens: int | None = None

    def limit(self, waiting: Iterable[Sequence], load: Load) -> int | None:
        return None

    def after_step(self, *, admitted: bool) -> None:
        return None


class TgiAdmission:
    """The batching controls of Hugging Face's TGI, with the meaning they have in its v3 backend's queue.

    - `max_batch_prefill_tokens`, rounded up to whole blocks, bounds the prompt tokens of a step; a prompt that does not
      fit whole joins with a chunk of it.
    - `max_batch_total_tokens` bounds the worst case: prompt and `max_tokens`, added up over the running sequences.
    - While a batch runs, newcomers join only if at least `floor(running * waiting_served_ratio)` of them can join
      together, so that decodes are not disturbed for a few;
    - unless `max_waiting_tokens` steps have passed since the last time someone joined: then any number may.
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

    def limit(self, waiting: Iterable[Sequence], load: Load) -> int | None:
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
            wanted = fitting = 1 + len(seq.siblings)
            if self._max_total is not None:
                fitting = min(wanted, (self._max_total - total) // seq.max_length)
            if fitting < seq.min_slots:
                break
            total += seq.max_length * fitting
            prefill += len(seq.tokens)
            count += fitting
            if fitting < wanted:
                break
        return count

    def after_step(self, *, admitted: bool) -> None:
        self._steps_since_join = 1 if admitted else self._steps_since_join + 1


def worst_case_tokens(seq: Sequence) -> int:
    """Prompt and `max_tokens` of a running sequence and of those that will fork from it."""
    return seq.max_length * seq.num_slots


class PrefillOrder:
    """Fair queueing of prompt tokens by a clock a tenant (Goyal, Vin and Cheng, "Start-time Fair Queueing", 1996).

    A tenant's clock counts the prompt tokens that were computed for it. The lowest clock goes first; those that are
    ahead of it by no more than a step's tokens count as equal. Of these the tenant with the fewest running sequences
    goes first, then the one with the fewest tokens to compute: so the prompt of one that asks for little is not cut up.
    A tenant whose prompts begin to be computed starts no lower than the lowest of the others, and keeps its lead.
    """

    def __init__(self, queue: QueuePolicy, step_tokens: int) -> None:
        self._queue = queue
        self._step_tokens = step_tokens
        self._clocks: dict[str, int] = {}
        self._active: set[str] = set()  # tenants with prompts to compute in the latest step

    def sort(self, prompts: list[Sequence], running: Sequences[Sequence]) -> list[Sequence]:
        """The running sequences that lack more than a token, in the order in which a step gives them its tokens."""
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
        """These tenants have prompts to compute, in this step."""
        lowest = min((self._clocks[name] for name in self._active & names), default=None)
        if lowest is None:  # none of them shared a step with another tenant: no debts
            self._clocks, lowest = {}, 0
        ahead = {name: clock for name, clock in self._clocks.items() if clock > lowest}
        self._clocks = ahead | {name: max(self._clocks.get(name, 0), lowest) for name in names}
        self._active = set(names)

    def computed(self, seq: Sequence, count: int) -> None:
        """`count` tokens of the sequence are computed in the step."""
        name = self._queue.tenant(seq)
        if name in self._clocks:
            self._clocks[name] += count
