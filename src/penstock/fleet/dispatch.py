"""The queue of a fleet: which request is handed over next, and what moves when an engine dies or drains.

    add_request ──> queue ──due──> at a replica ──record_output──> ... remove_request
                      ▲                │
                      └─ died, drained ┘

A replica is an engine and its successors; `placement.py` chooses it. When an engine dies, all its requests are queued
again but the suspects, which wait for the replica's next engine, unless that takes too long (`release`).

With one replica all requests go to it at once, and its engine's queue is the queue. With several they wait here until
an engine could soon run them. Engines with the same arithmetic (`Capacity.arithmetic`) continue each other's requests.
Pure: no I/O and no clock.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence

from penstock.api.request import BlockSource, SequenceOutput
from penstock.core.fairness import ANSWER_WEIGHT, PROMPT_WEIGHT, TenantCounters
from penstock.fleet.placement import Capacity, Placement, ReplicaStatus
from penstock.fleet.request import FleetRequest
from penstock.fleet.router import Router


class Dispatcher:
    """The queue and the replicas of a fleet. A request is its owner's, from `add_request` to `remove_request`."""

    def __init__(self, router: Router, policy: str = "fair") -> None:
        """
        Args:
            policy: of the queue, as the engine's: fair, fcfs or priority.
        """
        self._placement = Placement(router)
        self.replicas = self._placement.replicas
        self._policy = policy
        self._queue = FleetQueue()
        self._num_added = 0
        self.num_sequences = 0
        """Sequences of all requests, queued or at a replica."""
        self._touched: set[int] = set()  # replicas with requests to hand over, or with a suspect on trial

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_queued(self) -> int:
        """Requests that are at no replica."""
        return len(self._queue)

    @property
    def is_behind(self) -> bool:
        """Whether requests wait for an engine: in the queue or, with a single replica, for prompts before theirs."""
        if len(self.replicas) != 1:
            return len(self._queue) > 0
        (only,) = self.replicas.values()
        return only.has_backlog

    @property
    def has_waiting(self) -> bool:
        """Whether `due` may yield a request."""
        if len(self._queue):
            return True
        return bool(self._touched) and any(self.replicas[number].blame.num_waiting for number in self._touched)

    def has_arithmetic(self, arithmetic: str) -> bool:
        """Whether any replica has this arithmetic."""
        return any(replica.capacity.arithmetic == arithmetic for replica in self.replicas.values())

    def add_request(self, entry: FleetRequest) -> None:
        """Queue an accepted request. Its `arithmetic` is set already if a part of its answer was sent before."""
        request = entry.request
        tenant = request.tenant if self._policy == "fair" else ""
        # As the engines' own queues order them, so that a request does not change its rank on the way.
        entry.account = tenant, 0 if self._policy == "fcfs" else request.priority
        entry.ordinal = self._num_added
        self._num_added += 1
        self.num_sequences += entry.num_sequences
        if len(self.replicas) == 1:
            (only,) = self.replicas.values()
            if only.is_up and only.takes(entry):  # there is nothing to choose, and nothing to wait for
                self._enter(only, entry)
                return
        self._queue.push(entry)

    def remove_request(self, entry: FleetRequest, answers: Sequence[Sequence[int]] = ()) -> None:
        """Forget a request that has ended, for any reason; `answers` are its tokens if its engine ended it."""
        self.num_sequences -= entry.num_sequences
        if entry.replica is None:
            self._queue.remove(entry)
        else:
            self._leave(entry)
            entry.replica = None
        self._placement.forget_route(entry, answers)

    def record_output(self, replica: ReplicaStatus, entry: FleetRequest, output: SequenceOutput, step: int) -> bool:
        """Record an output of a replica's engine in its step of this number.

        Returns whether it counts: False if the request has left this replica.
        """
        if entry.replica != replica.number:  # sent before the request moved: its new engine computes it again
            return False
        if entry.pending:
            self._placement.prompt_computed(replica, entry, output.num_cached_tokens)
        if output.token_ids or output.is_sign_of_life:
            entry.arithmetic = replica.capacity.arithmetic
            if not entry.case.is_proven:
                replica.blame.progressed(entry, step)
            # It has a token, so its prompt is computed: it may move once the outputs of the step are delivered.
            if replica.capacity.role == "prefill":
                replica.begun[entry] = None
            if len(self.replicas) > 1:  # a single engine's own queue has the counters
                self._queue.charge(entry, ANSWER_WEIGHT * len(output.token_ids))
        return True

    def due(self) -> Iterator[tuple[int, FleetRequest]]:
        """Yield the requests to hand over now, in order, with their replicas' numbers; then the engine has them."""
        if len(self._queue):
            # Engines that try a suspect get nothing else: a request would wait there until the suspect is proven.
            on_trial = {number for number in self._touched if self.replicas[number].blame.is_trying}
            for replica, entry in self._placement.assign(self._queue.in_order(), on_trial):
                self._queue.remove(entry)
                self._enter(replica, entry)
        for number in sorted(self._touched):
            replica = self.replicas[number]
            if replica.is_up:
                for entry in replica.blame.due():
                    self._count(replica, entry)
                    yield number, entry
            # On trial a replica stays touched: a request that waits behind the suspect is due without another event.
            if not replica.blame.is_trying:
                self._touched.discard(number)

    def take_leaving(self, replica: ReplicaStatus) -> list[FleetRequest]:
        """Requests whose prompt a prefill engine has computed and that another replica continues; each once."""
        leaving = []
        for entry in replica.begun:
            if entry.is_leaving or entry.case.suspect:
                continue
            takers = self._placement.takers(entry, besides=replica.number)
            if any(taker.is_up and taker.capacity.role != "prefill" for taker in takers):
                entry.is_leaving = True
                leaving.append(entry)
        replica.begun.clear()
        return leaving

    def handed_over(self, replica: int, entry: FleetRequest, source: BlockSource | None) -> bool:
        """Queue a request that its replica has given up as asked; False if it has left the replica before."""
        if entry.replica != replica or not entry.is_leaving:
            return False
        self._requeue(entry)
        entry.source = source
        return True

    def unservable(self) -> list[FleetRequest]:
        """Queued requests that no replica can take: too long for all, or begun with an arithmetic that none has now."""
        return [
            entry
            for entry in self._queue.in_order()
            if not any(replica.takes(entry) for replica in self.replicas.values())
        ]

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_replica(self, number: int, capacity: Capacity) -> ReplicaStatus:
        """Add a replica whose engine is up; numbers are not used again."""
        replica = self._placement.add_replica(number, capacity)
        self._move_stranded()
        return replica

    def engine_died(
        self, number: int, request_indices: Sequence[int] | None, *, fault: bool, lost: bool = False
    ) -> FleetRequest | None:
        """Note that a replica's engine died: see `CrashBlame.died`. All its requests but suspects may move to others.

        Returns the request that is convicted, if one is; the caller removes it.
        """
        self._placement.replica_down(number)
        replica = self.replicas[number]
        # Only then do the engine's requests wait, as `_move_from` expects, with the suspects among them marked.
        convict = replica.blame.died(request_indices, fault=fault, lost=lost)
        self._touched.add(number)
        self._move_from(replica)
        return convict

    def release(self, number: int) -> None:
        """Queue the suspects of a replica whose next engine takes long, as soon as another replica can continue them.

        The replica that gets one tries it alone, as the next engine here would have done.
        """
        replica = self.replicas[number]
        if not replica.is_up:
            replica.is_overdue = True
            self._move_from(replica)

    def _move_from(self, replica: ReplicaStatus) -> None:
        """Queue the requests of a replica that is down that another can continue; suspects only if it is overdue."""
        for entry in replica.blame.waiting(with_suspects=replica.is_overdue):
            if self._placement.takers(entry, besides=replica.number):
                self._requeue(entry)

    def _move_stranded(self) -> None:
        """Queue the requests of replicas that are down, after a change of the engines that could continue them."""
        for replica in self.replicas.values():
            if not replica.is_up:
                self._move_from(replica)

    def engine_up(self, number: int, capacity: Capacity) -> None:
        """Note that a new engine is up at a replica; requests that it cannot continue are queued."""
        self._placement.replica_up(number, capacity)
        replica = self.replicas[number]
        for entry in replica.blame.requests():
            if not replica.takes(entry):
                self._requeue(entry)
        self._move_stranded()

    def drain(self, number: int) -> list[FleetRequest]:
        """Start nothing more at a replica. Returns the requests that move to others; the rest has to end here."""
        self._placement.drain_replica(number)
        moved = []
        for entry in self.replicas[number].blame.requests():
            if entry.case.suspect:
                continue
            if any(taker.is_up for taker in self._placement.takers(entry, besides=number)):
                self._requeue(entry)
                moved.append(entry)
        return moved

    def is_needed(self, number: int) -> bool:
        """Whether a request is at the replica, or no other replica can take it."""
        replica = self.replicas[number]
        if replica.num_requests:
            return True
        return any(
            replica.takes(entry) and not self._placement.takers(entry, besides=number)
            for entry in self._queue.in_order()
        )

    def remove_replica(self, number: int) -> None:
        """Forget a replica, and queue its requests."""
        for entry in self.replicas[number].blame.requests():
            self._requeue(entry)
        self._touched.discard(number)
        self._placement.remove_replica(number)

    # ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, replica: ReplicaStatus, entry: FleetRequest) -> None:
        entry.replica = replica.number
        replica.blame.add_request(entry)
        self._touched.add(replica.number)
        self._count(replica, entry)

    def _count(self, replica: ReplicaStatus, entry: FleetRequest) -> None:
        """Make a request part of its replica's load, and charge its tenant for a prompt still to be computed."""
        if self._placement.count(replica, entry) and not entry.has_begun and len(self.replicas) > 1:
            self._queue.charge(entry, PROMPT_WEIGHT * entry.pending)

    def _leave(self, entry: FleetRequest) -> None:
        assert entry.replica is not None
        replica = self.replicas[entry.replica]
        replica.blame.remove_request(entry)
        replica.begun.pop(entry, None)
        self._placement.leave(replica, entry)

    def _requeue(self, entry: FleetRequest) -> None:
        """Move a request from its replica to the queue, before all that were never handed over."""
        self._leave(entry)
        self._placement.forget_route(entry)
        entry.replica, entry.is_leaving, entry.source = None, False, None
        self._queue.push_back(entry)


class FleetQueue:
    """Requests in the order in which they are to be handed over.

    Requests that return from a replica come first, by arrival; then the others, by their tenant's counter of service
    (`TenantCounters`, as in the engine's queue), priority and arrival.
    """

    def __init__(self) -> None:
        self._returning: list[FleetRequest] = []
        self._waiting: dict[str, list[FleetRequest]] = defaultdict(list)  # by tenant
        self._counters = TenantCounters()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, entry: FleetRequest) -> None:
        """Add a request that was never handed over."""
        tenant = entry.account[0]
        self._counters.join(tenant)
        insort(self._waiting[tenant], entry, key=_by_priority)
        self._length += 1

    def push_back(self, entry: FleetRequest) -> None:
        """Add a request that returns from a replica."""
        insort(self._returning, entry, key=_by_arrival)
        entry.has_returned = True
        self._length += 1

    def remove(self, entry: FleetRequest) -> None:
        self._length -= 1
        if entry.has_returned:
            entry.has_returned = False
            del self._returning[bisect_left(self._returning, entry.ordinal, key=_by_arrival)]
            return
        tenant = entry.account[0]
        waiting = self._waiting[tenant]
        del waiting[bisect_left(waiting, _by_priority(entry), key=_by_priority)]
        if not waiting:
            del self._waiting[tenant]
            self._counters.leave(tenant)

    def charge(self, entry: FleetRequest, amount: int) -> None:
        """Add to the counter of the request's tenant."""
        self._counters.charge(entry.account[0], amount)

    def in_order(self) -> Iterator[FleetRequest]:
        """Yield the requests in the order of being handed over. The queue may not change meanwhile."""
        yield from self._returning
        yield from self._counters.in_order(lambda tenant: iter(self._waiting[tenant]), _prompt_length)


def _by_priority(entry: FleetRequest) -> tuple[int, int]:
    return entry.account[1], entry.ordinal


def _by_arrival(entry: FleetRequest) -> int:
    return entry.ordinal


def _prompt_length(entry: FleetRequest) -> int:
    return len(entry.request.prompt_token_ids)
