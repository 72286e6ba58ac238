"""Chooses the engine for a queued request, by each engine's limits and load, and the router.

    assign(queued) ──> (replica, request) ──count──> in the replica's load ──has_output──> its prompt is computed
                                                           └──────leave──────> out of the load

A replica is an engine and its successors: a new engine at a replica takes up the requests of the one that died there.
With one replica every request goes to it at once. With several, a replica is given a request only when its engine could
run it in one of the next steps, so that the choice is made as late as possible. Pure: no I/O and no clock.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field
from itertools import islice

from penstock.api.request import Request
from penstock.config.engine_config import Role
from penstock.dataclass import dataclass
from penstock.fleet.crash_blame import CrashBlame
from penstock.fleet.request import FleetRequest, Route
from penstock.fleet.router import ReplicaLoad, Router

MAX_CONSIDERED = 64
"""Maximum requests at the head of the queue that one call of `assign` considers."""
SHORT_PROMPT = 64
"""Maximum tokens to compute for which a prompt is not sent to a prefill engine."""
STEPS_AHEAD = 2
"""Maximum prompt tokens queued in an engine, in multiples of a step's token budget."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of an engine, and the arithmetic it computes with."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    arithmetic: str
    """Engines with the same value give bit-identical answers."""
    role: Role = "any"

    def fits(self, request: Request) -> bool:
        """Whether the engine could ever run the request."""
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        return longest <= self.max_model_len and request.params.width <= self.max_num_seqs


@dataclass(slots=True, eq=False)
class ReplicaStatus:
    """A replica as dispatch sees it: its engine's limits, state and load, and the requests that it has."""

    number: int
    capacity: Capacity
    load: ReplicaLoad
    blame: CrashBlame = field(default_factory=CrashBlame)
    is_up: bool = True
    is_overdue: bool = False
    """Whether its next engine takes long."""
    is_draining: bool = False
    begun: dict[FleetRequest, None] = field(default_factory=dict)
    """Of a prefill engine: the requests with an output since `Dispatcher.take_leaving`, an ordered set."""
    pending: dict[tuple[str, int], int] = field(default_factory=dict)
    """`load.pending` by account."""

    @property
    def num_requests(self) -> int:
        """Requests in its engine, or waiting for the next one."""
        return self.blame.num_in_engine + self.blame.num_waiting

    @property
    def is_half_idle(self) -> bool:
        """Whether at most half of the engine's sequence slots are taken."""
        return 2 * self.load.num_open <= self.capacity.max_num_seqs

    @property
    def has_backlog(self) -> bool:
        """Whether its engine has prompts for more than the next steps."""
        return self.load.pending >= STEPS_AHEAD * self.capacity.max_num_batched_tokens

    def takes(self, entry: FleetRequest) -> bool:
        """Whether the replica could start or continue the request."""
        return self.capacity.fits(entry.request) and entry.arithmetic in (None, self.capacity.arithmetic)

    def has_room(self, entry: FleetRequest | None) -> bool:
        """Whether the engine could soon start the request, whatever others wait for; None: whether it has slots."""
        most = self.capacity.max_num_seqs
        if not self.load.num_open:
            return True
        if self.load.num_open >= most + most // 8:
            return False
        if entry is None:
            return True
        tenant, priority = entry.account
        ahead = sum(count for (name, urgency), count in self.pending.items() if name == tenant and urgency <= priority)
        return ahead < STEPS_AHEAD * self.capacity.max_num_batched_tokens


class Placement:
    """The replicas of a fleet and their loads, and the choice among them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.replicas: dict[int, ReplicaStatus] = {}
        self._up: list[ReplicaStatus] = []
        self._are_alike = True  # whether all replicas take the same requests

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_replica(self, number: int, capacity: Capacity) -> ReplicaStatus:
        """Add a replica whose engine is up."""
        replica = self.replicas[number] = ReplicaStatus(number, capacity, ReplicaLoad(number))
        self._router.add_replica(number, capacity.num_blocks, capacity.block_size)
        self._note_replicas()
        return replica

    def replica_up(self, number: int, capacity: Capacity) -> None:
        """Note that a new engine is up at a replica, with nothing cached."""
        replica = self.replicas[number]
        replica.capacity, replica.is_up, replica.is_overdue = capacity, True, False
        self._router.add_replica(number, capacity.num_blocks, capacity.block_size)
        self._note_replicas()

    def replica_down(self, number: int) -> None:
        """Note that a replica's engine died, and with it all load."""
        replica = self.replicas[number]
        replica.is_up = False
        self._note_replicas()
        # With the engine its KV cache is gone.
        self._router.lost(number)
        replica.load.num_open = replica.load.pending = 0
        replica.pending.clear()
        replica.begun.clear()
        for entry in replica.blame.requests():
            entry.is_counted, entry.pending = False, 0
            entry.is_leaving = False  # the dead engine cannot answer `HandOver` any more

    def drain_replica(self, number: int) -> None:
        """Assign no more requests to a replica, unless no other takes them."""
        self.replicas[number].is_draining = True
        self._note_replicas()

    def remove_replica(self, number: int) -> None:
        del self.replicas[number]
        self._note_replicas()
        self._router.remove_replica(number)

    def _note_replicas(self) -> None:
        self._up = [replica for replica in self.replicas.values() if replica.is_up]
        # By identity first: replicas share a few objects, and hashing a thousand equal ones takes long.
        kinds = {id(replica.capacity): replica.capacity for replica in self.replicas.values()}
        draining = any(replica.is_draining for replica in self.replicas.values())
        self._are_alike = not draining and len(set(kinds.values())) == 1

    def takers(self, entry: FleetRequest, besides: int | None = None) -> list[ReplicaStatus]:
        """The replicas that could start or continue a request; draining ones only if there is no other.

        Args:
            besides: a replica that is left out; then draining ones are left out, too.
        """
        takers = [replica for number, replica in self.replicas.items() if number != besides and replica.takes(entry)]
        lasting = [replica for replica in takers if not replica.is_draining]
        return lasting if lasting or besides is not None else takers

    # ── the choice ───────────────────────────────────────────────────────────────────────────────────────────────────

    def assign(
        self, queued: Iterable[FleetRequest], closed: Collection[int]
    ) -> Iterator[tuple[ReplicaStatus, FleetRequest]]:
        """Yield the queued requests that can be handed over now, each with its replica.

        The caller calls `count` for each before it takes the next.

        Args:
            closed: replicas that take no requests now, of several.
        """
        if len(self.replicas) == 1:
            (only,) = self.replicas.values()
            for entry in list(queued) if only.is_up else ():
                if only.takes(entry):
                    yield only, entry
            return
        open_replicas = [replica for replica in self._up if replica.number not in closed] if closed else self._up
        if not any(replica.has_room(None) for replica in open_replicas):
            return
        reserved: list[tuple[ReplicaLoad, int, int]] = []
        for entry in list(islice(queued, MAX_CONSIDERED)):  # a list: the caller removes what it is given from the queue
            chosen = self._choose(entry, open_replicas)
            if chosen is None:
                continue
            if chosen.has_room(entry):
                yield chosen, entry
            else:  # it waits for this replica, and is ahead of the requests behind it in the queue
                reserved.append((chosen.load, self._missing(entry, chosen), entry.num_sequences))
                chosen.load.pending += reserved[-1][1]
                chosen.load.num_open += entry.num_sequences
        for load, tokens, sequences in reserved:  # reservations last for one call: the next one chooses again
            load.pending -= tokens
            load.num_open -= sequences

    def _choose(self, entry: FleetRequest, open_replicas: Sequence[ReplicaStatus]) -> ReplicaStatus | None:
        """The replica that a request should go to, now or when it has room; None if there is none."""
        first = open_replicas[0] if open_replicas else None
        if first is not None and self._are_alike and first.takes(entry):  # spares asking each of a thousand replicas
            suitable = open_replicas
        else:
            takers = {replica.number for replica in self.takers(entry)}
            suitable = [replica for replica in open_replicas if replica.number in takers]
        # The role narrows the choice before the router sees it: it knows prefixes and loads alone.
        suitable = self._of_role(entry, suitable)
        if not self._router.may_wait:
            suitable = [replica for replica in suitable if replica.has_room(entry)]
        if not suitable:
            return None
        chosen = self._ask_router(entry, suitable)
        if not chosen.has_room(None):  # a slot may take long to become free: an engine that is half idle is better
            idle = [replica for replica in suitable if replica.is_half_idle and replica.has_room(entry)]
            chosen = self._ask_router(entry, idle) if idle else chosen
        return chosen

    def _of_role(self, entry: FleetRequest, replicas: Sequence[ReplicaStatus]) -> Sequence[ReplicaStatus]:
        """The replicas whose role is the request's next phase, prefill or decode; all if there are none."""
        if all(replica.capacity.role == "any" for replica in replicas):
            return replicas
        others = [replica for replica in replicas if replica.capacity.role != "prefill"]
        unwanted: Role = "prefill"
        if not entry.has_begun and not any(self._missing(entry, replica) <= SHORT_PROMPT for replica in others):
            unwanted = "decode"
        return [replica for replica in replicas if replica.capacity.role != unwanted] or replicas

    def _ask_router(self, entry: FleetRequest, replicas: Sequence[ReplicaStatus]) -> ReplicaStatus:
        return self.replicas[self._router.choose(_route_of(entry), [replica.load for replica in replicas])]

    def _missing(self, entry: FleetRequest, replica: ReplicaStatus) -> int:
        """Estimate of the prompt tokens that the replica would have to compute."""
        return self._router.missing(_route_of(entry), replica.number)

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def count(self, replica: ReplicaStatus, entry: FleetRequest) -> bool:
        """Add a request that is handed over to its replica's load; False if it is counted already."""
        if entry.is_counted:
            return False
        entry.is_counted = True
        if len(self.replicas) == 1:  # the router has no choice to make
            entry.pending = len(entry.request.prompt_token_ids)
        else:
            # With a source, the engine loads the prompt's blocks, and about one token is left to compute.
            entry.pending = 1 if entry.source is not None else self._missing(entry, replica)
            self._router.sent(_route_of(entry), replica.number)
        replica.load.num_open += entry.num_sequences
        replica.load.pending += entry.pending
        replica.pending[entry.account] = replica.pending.get(entry.account, 0) + entry.pending
        return True

    def prompt_computed(self, replica: ReplicaStatus, entry: FleetRequest, num_cached_tokens: int) -> None:
        """Note a request's first output at its replica, which says how many tokens of its prompt were cached."""
        if entry.route is not None:
            self._router.found(entry.route, num_cached_tokens)
        self._settle(replica, entry)

    def _settle(self, replica: ReplicaStatus, entry: FleetRequest) -> None:
        """Take a prompt that is computed, or will not be, out of its replica's load."""
        replica.load.pending -= entry.pending
        left = replica.pending[entry.account] - entry.pending
        # An account without pending tokens goes: the table would grow with each tenant that ever called.
        if left:
            replica.pending[entry.account] = left
        else:
            del replica.pending[entry.account]
        entry.pending = 0

    def leave(self, replica: ReplicaStatus, entry: FleetRequest) -> None:
        """Take a request out of its replica's load."""
        if entry.pending:
            self._settle(replica, entry)
        if entry.is_counted:
            replica.load.num_open -= entry.num_sequences
        entry.is_counted = False

    def forget_route(self, entry: FleetRequest, answers: Sequence[Sequence[int]] = ()) -> None:
        """Have the router forget a request; `answers` are its tokens if it ended at its replica."""
        if entry.route is not None:
            self._router.ended(entry.route, answers)
            entry.route = None


def _route_of(entry: FleetRequest) -> Route:
    if entry.route is None:
        entry.route = Route(entry.request)
    return entry.route
