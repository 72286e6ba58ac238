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
from collections.abc import Iterator, Sequence

from penstock.api.request import BlockSource, Request, SequenceOutput
from penstock.core.fairness import ANSWER_WEIGHT, PROMPT_WEIGHT
from penstock.fleet.crash_blame import CrashBlame
from penstock.fleet.placement import Capacity, FleetRequest, Placement, ReplicaStatus
from penstock.fleet.router import ReplicaLoad, Router


class Dispatcher:
    """All requests of a fleet, from `add_request` to `remove_request`."""

    def __init__(self, router: Router, policy: str = "fair") -> None:
        """
        Args:
            policy: of the queue, as the engine's: fair, fcfs or priority.
        """
        self._placement = Placement(router)
        self._replicas = self._placement.replicas
        self._policy = policy
        self._requests: dict[str, FleetRequest] = {}
        self._queue = _Queue()
        self._num_added = 0
        self._blame: dict[int, CrashBlame] = {}
        self._begun: dict[
            int, dict[str, None]
        ] = {}  # by prefill engine: had an output since `take_leaving` was last called
        self._touched: set[int] = set()  # replicas with requests to hand over, or with a suspect on trial
        self._overdue: set[int] = set()  # replicas whose next engine takes long

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_queued(self) -> int:
        """Requests that are at no replica."""
        return len(self._queue)

    @property
    def num_sequences(self) -> int:
        """Sequences of all requests, queued or at a replica."""
        return sum(entry.num_sequences for entry in self._requests.values())

    @property
    def is_behind(self) -> bool:
        """Whether requests wait for an engine: in the queue or, with a single replica, for prompts before theirs."""
        if len(self._replicas) != 1:
            return len(self._queue) > 0
        (only,) = self._replicas.values()
        return only.has_backlog

    @property
    def has_waiting(self) -> bool:
        """Whether `due` may yield a request."""
        return len(self._queue) > 0 or any(self._blame[number].num_waiting for number in self._touched)

    def num_in_engine(self, replica: int) -> int:
        """Requests that the replica's engine has now."""
        return self._blame[replica].num_in_engine

    def num_at(self, replica: int) -> int:
        """Requests that are at the replica, in its engine or waiting for the next one."""
        return self.num_in_engine(replica) + self._blame[replica].num_waiting

    def replica_of(self, request_id: str) -> int | None:
        """The replica of a request; None if it is queued or unknown."""
        entry = self._requests.get(request_id)
        return None if entry is None else entry.replica

    def is_in_engine(self, request_id: str) -> bool:
        """Whether an engine has the request: it is neither queued nor waiting at its replica for the next engine."""
        replica = self.replica_of(request_id)
        return replica is not None and self._blame[replica].has_handed_over(request_id)

    def has_begun(self, request_id: str) -> bool:
        """Whether a request has had outputs."""
        return self._requests[request_id].arithmetic is not None

    def arithmetic_of(self, request_id: str) -> str | None:
        """The arithmetic of a request's outputs; None while it has had none."""
        return self._requests[request_id].arithmetic

    def has_arithmetic(self, arithmetic: str) -> bool:
        """Whether any replica has this arithmetic."""
        return any(replica.capacity.arithmetic == arithmetic for replica in self._replicas.values())

    def add_request(self, request: Request, arithmetic: str | None = None) -> None:
        """Queue an accepted request.

        Args:
            arithmetic: the one it must be computed with, as a part of its answer was sent before; None: any.
        """
        assert request.request_id not in self._requests, f"request id {request.request_id!r} is here already"
        tenant = request.tenant if self._policy == "fair" else ""
        account = tenant, 0 if self._policy == "fcfs" else request.priority
        entry = FleetRequest(request, account, self._num_added, arithmetic=arithmetic)
        self._num_added += 1
        self._requests[request.request_id] = entry
        self._queue.push(entry)

    def remove_request(self, request_id: str, answers: Sequence[Sequence[int]] = ()) -> None:
        """Forget a request that has ended, for any reason; `answers` are its tokens if its engine ended it."""
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            if entry.replica is None:
                self._queue.remove(entry)
            else:
                self._leave(entry)
            self._placement.forget_route(entry, answers)

    def record_output(self, replica: int, output: SequenceOutput, step: int) -> bool:
        """Record an output of a replica's engine in its step of this number.

        Returns whether it counts: False if the request has ended or left this replica.
        """
        entry = self._requests.get(output.request_id)
        if entry is None or entry.replica != replica:  # sent before the request moved: its new engine computes it again
            return False
        at = self._replicas[replica]
        self._placement.has_output(at, entry, output.num_cached_tokens)
        if output.token_ids or output.is_sign_of_life:
            entry.arithmetic = at.capacity.arithmetic
            self._blame[replica].progressed(output.request_id, step)
            if at.capacity.role == "prefill":
                self._begun[replica][output.request_id] = None
            if len(self._replicas) > 1:  # a single engine's own queue has the counters
                self._queue.charge(entry, ANSWER_WEIGHT * len(output.token_ids))
        return True

    def due(self) -> Iterator[tuple[int, str]]:
        """Yield the requests to hand over now, in order, each with its replica; from then on the engine has it."""
        if len(self._queue):
            # Engines that try a suspect get nothing else: a request would wait there until the suspect is proven.
            on_trial = {number for number in self._touched if self._blame[number].is_trying}
            for replica, entry in self._placement.assign(self._queue.in_order(), on_trial):
                self._queue.remove(entry)
                self._enter(replica, entry)
        for number in sorted(self._touched):
            replica, blame = self._replicas[number], self._blame[number]
            if replica.is_up:
                for request_id in blame.due():
                    self._count(replica, self._requests[request_id])
                    yield number, request_id
            if not blame.is_trying:
                self._touched.discard(number)

    def take_leaving(self, replica: int) -> list[str]:
        """Requests whose prompt a prefill engine has computed and that another replica continues; each once."""
        at = self._replicas[replica]
        if at.capacity.role != "prefill":
            return []
        leaving = []
        for request_id in self._begun[replica]:
            entry = self._requests.get(request_id)
            if (
                entry is None
                or entry.replica != replica
                or entry.is_leaving
                or request_id in self._blame[replica].suspects
            ):
                continue
            takers = self._placement.takers(entry, besides=replica)
            if any(taker.is_up and taker.capacity.role != "prefill" for taker in takers):
                entry.is_leaving = True
                leaving.append(request_id)
        self._begun[replica].clear()
        return leaving

    def handed_over(self, replica: int, request_id: str, source: BlockSource | None) -> bool:
        """Queue a request that its replica has given up as asked; False if it has ended or left the replica before."""
        entry = self._requests.get(request_id)
        if entry is None or entry.replica != replica or not entry.is_leaving:
            return False
        self._requeue(entry)
        entry.source = source
        return True

    def take_source(self, request_id: str) -> BlockSource | None:
        """Where the KV blocks of a request that is handed over now can be read from; None the second time."""
        entry = self._requests[request_id]
        source, entry.source = entry.source, None
        return source

    def unservable(self) -> list[str]:
        """Queued requests that no replica can take: too long for all, or begun with an arithmetic that none has now."""
        return [
            entry.request.request_id
            for entry in self._queue.in_order()
            if not any(replica.takes(entry) for replica in self._replicas.values())
        ]

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_replica(self, replica: int, capacity: Capacity) -> None:
        """Add a replica whose engine is up; numbers are not used again."""
        self._blame[replica], self._begun[replica] = CrashBlame(), {}
        self._placement.add_replica(replica, capacity)
        self._move_stranded()

    def engine_died(
        self, replica: int, request_indices: Sequence[int] | None, *, fault: bool, lost: bool = False
    ) -> str | None:
        """Note that a replica's engine died: see `CrashBlame.died`. All its requests but suspects may move to others.

        Returns the request that is convicted, if one is; the caller removes it.
        """
        blame, here = self._blame[replica], self._at(replica)
        self._placement.replica_down(replica, here)
        self._begun[replica].clear()
        for entry in here:
            entry.is_leaving = False  # the dead engine cannot answer `HandOver` any more
        convict = blame.died(request_indices, fault=fault, lost=lost)
        self._touched.add(replica)
        self._move_from(replica)
        return convict

    def release(self, replica: int) -> None:
        """Queue the suspects of a replica whose next engine takes long, as soon as another replica can continue them.

        The replica that gets one tries it alone, as the next engine here would have done.
        """
        if not self._replicas[replica].is_up:
            self._overdue.add(replica)
            self._move_from(replica)

    def _move_from(self, replica: int) -> None:
        """Queue the requests of a replica that is down that another can continue; suspects only if it is overdue."""
        for request_id in self._blame[replica].waiting(with_suspects=replica in self._overdue):
            entry = self._requests[request_id]
            if self._placement.takers(entry, besides=replica):
                self._requeue(entry)

    def _move_stranded(self) -> None:
        """Queue the requests of replicas that are down, after a change of the engines that could continue them."""
        for number, replica in self._replicas.items():
            if not replica.is_up:
                self._move_from(number)

    def engine_up(self, replica: int, capacity: Capacity) -> None:
        """Note that a new engine is up at a replica; requests that it cannot continue are queued."""
        self._overdue.discard(replica)
        self._placement.replica_up(replica, capacity)
        for entry in self._at(replica):
            if not self._replicas[replica].takes(entry):
                self._requeue(entry)
        self._move_stranded()

    def drain(self, replica: int) -> list[str]:
        """Start nothing more at a replica. Returns the requests that move to others; the rest has to end here."""
        self._placement.drain_replica(replica)
        moved = []
        for entry in self._at(replica):
            if entry.request.request_id in self._blame[replica].suspects:
                continue
            if any(taker.is_up for taker in self._placement.takers(entry, besides=replica)):
                self._requeue(entry)
                moved.append(entry.request.request_id)
        return moved

    def is_needed(self, replica: int) -> bool:
        """Whether a request is at the replica, or no other replica can take it."""
        if self._at(replica):
            return True
        return any(
            self._replicas[replica].takes(entry) and not self._placement.takers(entry, besides=replica)
            for entry in self._queue.in_order()
        )

    def remove_replica(self, replica: int) -> None:
        """Forget a replica, and queue its requests."""
        for entry in self._at(replica):
            self._requeue(entry)
        self._touched.discard(replica)
        self._overdue.discard(replica)
        self._placement.remove_replica(replica)
        del self._blame[replica], self._begun[replica]

    def load_of(self, replica: int) -> ReplicaLoad:
        """The load of a replica."""
        return self._replicas[replica].load

    # ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _at(self, replica: int) -> list[FleetRequest]:
        """The requests of a replica, in the order they came."""
        return [entry for entry in self._requests.values() if entry.replica == replica]

    def _enter(self, replica: ReplicaStatus, entry: FleetRequest) -> None:
        entry.replica = replica.number
        self._blame[replica.number].add_request(entry.request.request_id, entry.case)
        entry.case = None
        self._touched.add(replica.number)
        self._count(replica, entry)

    def _count(self, replica: ReplicaStatus, entry: FleetRequest) -> None:
        """Make a request part of its replica's load, and charge its tenant for a prompt still to be computed."""
        if self._placement.count(replica, entry) and entry.arithmetic is None and len(self._replicas) > 1:
            self._queue.charge(entry, PROMPT_WEIGHT * entry.pending)

    def _leave(self, entry: FleetRequest) -> None:
        assert entry.replica is not None
        entry.case = self._blame[entry.replica].remove_request(entry.request.request_id)
        self._placement.leave(self._replicas[entry.replica], entry)

    def _requeue(self, entry: FleetRequest) -> None:
        """Move a request from its replica to the queue, before all that were never handed over."""
        self._leave(entry)
        self._placement.forget_route(entry)
        entry.replica, entry.is_leaving, entry.source = None, False, None
        self._queue.push_back(entry)


class _Queue:
    """Requests in the order in which they are to be handed over.

    Requests that return from a replica come first, by arrival; then the others, by their tenant's counter of service
    (as `FairQueue` in `core/fairness.py`, without its part for running requests), priority and arrival.
    """

    def __init__(self) -> None:
        self._returning: list[tuple[tuple[int, int], FleetRequest]] = []
        self._waiting: dict[str, list[tuple[tuple[int, int], FleetRequest]]] = {}
        self._counters: dict[str, int] = {}
        self._came_back: set[str] = set()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, entry: FleetRequest) -> None:
        tenant = entry.account[0]
        if tenant not in self._waiting:
            lowest = min((self._counters[name] for name in self._waiting), default=None)
            if lowest is None:  # no request waits: counters begin anew
                self._counters.clear()
            self._counters[tenant] = max(self._counters.get(tenant, 0), lowest or 0)
            self._waiting[tenant] = []
        insort(self._waiting[tenant], (_key(entry), entry), key=_first)
        self._length += 1

    def push_back(self, entry: FleetRequest) -> None:
        insort(self._returning, ((0, entry.ordinal), entry), key=_first)
        self._came_back.add(entry.request.request_id)
        self._length += 1

    def remove(self, entry: FleetRequest) -> None:
        self._length -= 1
        if entry.request.request_id in self._came_back:
            self._came_back.remove(entry.request.request_id)
            del self._returning[bisect_left(self._returning, (0, entry.ordinal), key=_first)]
            return
        tenant = entry.account[0]
        waiting = self._waiting[tenant]
        del waiting[bisect_left(waiting, _key(entry), key=_first)]
        if not waiting:
            del self._waiting[tenant]

    def charge(self, entry: FleetRequest, amount: int) -> None:
        """Add to the counter of the request's tenant, while any request waits."""
        if self._length:
            tenant = entry.account[0]
            self._counters[tenant] = self._counters.get(tenant, 0) + amount

    def in_order(self) -> Iterator[FleetRequest]:
        """Yield the requests in the order of being handed over. The queue may not change meanwhile."""
        for _, entry in self._returning:
            yield entry
        heads = dict.fromkeys(self._waiting, 0)
        counters = {tenant: self._counters[tenant] for tenant in self._waiting}
        while heads:
            tenant = min(heads, key=lambda name: (counters[name], self._waiting[name][heads[name]][0][1]))
            entry = self._waiting[tenant][heads[tenant]][1]
            yield entry
            counters[tenant] += PROMPT_WEIGHT * len(entry.request.prompt_token_ids)
            heads[tenant] += 1
            if heads[tenant] == len(self._waiting[tenant]):
                del heads[tenant]


def _key(entry: FleetRequest) -> tuple[int, int]:
    return entry.account[1], entry.ordinal


def _first(pair: tuple[tuple[int, int], FleetRequest]) -> tuple[int, int]:
    return pair[0]
