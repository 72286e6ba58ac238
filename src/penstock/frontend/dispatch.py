"""Which engine has which request, and which request is next: a fleet's queue. Pure: no I/O and no clock.

    add ──> queue ──due──> at a place ──outputs──> got ... remove        a place: an engine and those that follow it
              ▲                │
              └─ died, drained ┘       of a dead engine: all but its suspects, who wait for the next engine of its
                                       place, unless that is long in coming (`release`)

With one place all requests go to it at once, and its engine's queue is the queue. With several they wait here for as
long as possible, so that the choice is made with what is known last: a place takes a request while its engine could
run it in one of the next steps. Engines that compute the same to the bit (`Capacity.arithmetic`) take over from one
another.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.config import Role
from penstock.core.fairness import ANSWER_WEIGHT, PROMPT_WEIGHT
from penstock.frontend.recovery.crash_blame import Case, CrashBlame
from penstock.frontend.router import PlaceLoad, Router
from penstock.request import BlockSource, Request, SequenceOutput

MAX_CONSIDERED = 64
"""Of the queue's first requests, how many are offered to places at a time."""
SHORT_PROMPT = 64
"""Tokens to compute at most for which a prompt is not sent to a prefill engine."""
STEPS_AHEAD = 2
"""Prompts are handed over before they can be computed, as many as these steps compute."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold, and how it computes."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    arithmetic: str
    """Equal for engines that give equal answers, to the bit."""
    role: Role = "any"

    def fits(self, request: Request) -> bool:
        """Whether the engine could ever run the request."""
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        return longest <= self.max_model_len and request.params.width <= self.max_num_seqs


@dataclass(slots=True, eq=False)
class _Place:
    """One engine at a time; each new one takes up the requests of the last."""

    capacity: Capacity
    load: PlaceLoad
    is_up: bool = True
    is_draining: bool = False
    blame: CrashBlame = field(default_factory=CrashBlame)
    pending: dict[tuple[str, int], int] = field(default_factory=dict)
    """Of `load.pending`, what is each tenant's, by priority."""
    begun: dict[str, None] = field(default_factory=dict)
    """Requests that had an output here since `leaving` was last asked, of a prefill engine."""

    @property
    def is_half_idle(self) -> bool:
        """Whether its engine has no more than half of the sequences that it can run."""
        return 2 * self.load.num_open <= self.capacity.max_num_seqs

    def has_room(self, entry: "_Entry | None") -> bool:
        """Whether the engine could begin with the request soon, whatever others wait for; None: it has slots left."""
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


@dataclass(slots=True, eq=False)
class _Entry:
    """One request, queued or at a place."""

    request: Request
    account: tuple[str, int]
    """Tenant and priority, as far as the queue's policy uses them."""
    ordinal: int
    place: int | None = None
    arithmetic: str | None = None
    """Of the engine that its tokens are from; None while it has none."""
    is_counted: bool = False
    """Whether it is part of its place's load."""
    is_routed: bool = False
    """Whether the router knows of it; with a single place it is not asked."""
    is_leaving: bool = False
    """Whether its place was asked to hand it over."""
    source: BlockSource | None = None
    """Where its last place has left the blocks of its text."""
    pending: int = 0
    """Its part of the prompt tokens that are to be computed there."""
    case: Case | None = None
    """Of a suspect that was taken from its place, for the next one."""

    @property
    def num_sequences(self) -> int:
        return self.request.params.num_sequences


class Dispatcher:
    """All requests of a fleet, from `add_request` to `remove_request`."""

    def __init__(self, router: Router, policy: str = "fair") -> None:
        """
        Args:
            policy: of the queue, as the engine's: fair, fcfs or priority.
        """
        self._router = router
        self._policy = policy
        self._places: dict[int, _Place] = {}
        self._entries: dict[str, _Entry] = {}
        self._queue = _Queue()
        self._num_added = 0
        self._touched: set[int] = set()  # places at which requests wait to be handed over, or a suspect is tried
        self._up: list[_Place] = []  # those whose engines are up
        self._are_alike = True  # whether all places take the same requests

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_queued(self) -> int:
        """Requests that are at no place."""
        return len(self._queue)

    @property
    def num_sequences(self) -> int:
        """Sequences of all requests, queued or at a place."""
        return sum(entry.num_sequences for entry in self._entries.values())

    @property
    def is_behind(self) -> bool:
        """Whether requests wait for an engine: in the queue or, with a single place, for prompts before theirs."""
        if len(self._places) != 1:
            return len(self._queue) > 0
        (only,) = self._places.values()
        return only.load.pending >= STEPS_AHEAD * only.capacity.max_num_batched_tokens

    @property
    def has_waiting(self) -> bool:
        """Whether a call of `due` may give something."""
        return len(self._queue) > 0 or any(self._places[number].blame.num_waiting for number in self._touched)

    def num_in_engine(self, place: int) -> int:
        """Requests that the place's engine has now."""
        return self._places[place].blame.num_in_engine

    def num_at(self, place: int) -> int:
        """Requests that are at the place, in its engine or waiting for the next one."""
        return self.num_in_engine(place) + self._places[place].blame.num_waiting

    def place_of(self, request_id: str) -> int | None:
        """Where a request is; None if it is queued or unknown."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.place

    def has_begun(self, request_id: str) -> bool:
        """Whether a request has had outputs."""
        return self._entries[request_id].arithmetic is not None

    def arithmetic_of(self, request_id: str) -> str | None:
        """How a request is computed; None while it has had no outputs."""
        return self._entries[request_id].arithmetic

    def has_arithmetic(self, arithmetic: str) -> bool:
        """Whether any place computes so."""
        return any(place.capacity.arithmetic == arithmetic for place in self._places.values())

    def add_request(self, request: Request, arithmetic: str | None = None) -> None:
        """A request was accepted.

        Args:
            arithmetic: how it must be computed, as a part of its answer was sent from elsewhere; None: in any way.
        """
        assert request.request_id not in self._entries, f"request id {request.request_id!r} is here already"
        tenant = request.tenant if self._policy == "fair" else ""
        entry = _Entry(request, (tenant, 0 if self._policy == "fcfs" else request.priority), self._num_added)
        entry.arithmetic = arithmetic
        self._num_added += 1
        self._entries[request.request_id] = entry
        self._queue.push(entry)

    def remove_request(self, request_id: str, answers: Sequence[Sequence[int]] = ()) -> None:
        """A request has ended, however it did; with the tokens of its answers, if it is the engine that ended it."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            if entry.place is None:
                self._queue.remove(entry)
            else:
                self._leave(entry)
            self._forget_route(entry, answers)

    def got(self, place: int, output: SequenceOutput, step: int) -> bool:
        """Note an output that the place's engine made in its step of this number.

        Returns whether it counts: False if the request has ended, or was taken from this place before.
        """
        entry = self._entries.get(output.request_id)
        if entry is None or entry.place != place:
            return False
        at = self._places[place]
        if entry.pending:
            if entry.is_routed:
                self._router.found(output.request_id, output.num_cached_tokens)
            self._settle(at, entry)
        if output.token_ids or output.is_sign_of_life:
            entry.arithmetic = at.capacity.arithmetic
            at.blame.progressed(output.request_id, step)
            if at.capacity.role == "prefill":
                at.begun[output.request_id] = None
            if len(self._places) > 1:
                self._queue.charge(entry, ANSWER_WEIGHT * len(output.token_ids))
        return True

    def due(self) -> Iterator[tuple[int, str]]:
        """The requests to hand over now, in this order, each with its place; from now on its engine has it."""
        if len(self._queue):
            self._assign()
        for number in sorted(self._touched):
            place = self._places[number]
            if place.is_up:
                for request_id in place.blame.due():
                    entry = self._entries[request_id]
                    self._count(place, entry)
                    yield number, request_id
            if not place.blame.is_trying:
                self._touched.discard(number)

    def leaving(self, place: int) -> list[str]:
        """Requests whose prompts a prefill engine has computed, and that are to go on elsewhere: once each."""
        at = self._places[place]
        if at.capacity.role != "prefill":
            return []
        leaving = []
        for request_id in at.begun:
            entry = self._entries.get(request_id)
            if entry is None or entry.place != place or entry.is_leaving or request_id in at.blame.suspects:
                continue
            if any(one.is_up and one.capacity.role != "prefill" for one in self._takers(entry, besides=place)):
                entry.is_leaving = True
                leaving.append(request_id)
        at.begun.clear()
        return leaving

    def handed_over(self, place: int, request_id: str, source: BlockSource | None) -> bool:
        """A place has given a request up that it was to hand over; it is queued, unless it has ended."""
        entry = self._entries.get(request_id)
        if entry is None or entry.place != place or not entry.is_leaving:
            return False
        self._leave(entry)
        self._requeue(entry)
        entry.source = source
        return True

    def take_source(self, request_id: str) -> BlockSource | None:
        """Where blocks of a request's text are, for the place that it is handed over to now."""
        entry = self._entries[request_id]
        source, entry.source = entry.source, None
        return source

    def unservable(self) -> list[str]:
        """Queued requests that no place will ever take: too long for all, or begun with an arithmetic that is gone."""
        return [
            entry.request.request_id
            for entry in self._queue.in_order()
            if not any(_takes(place, entry) for place in self._places.values())
        ]

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_place(self, place: int, capacity: Capacity) -> None:
        """An engine is up at a place that is new; numbers are not used again."""
        self._places[place] = _Place(capacity, PlaceLoad(place))
        self._router.add_place(place, capacity.num_blocks, capacity.block_size)
        self._note_places()

    def died(self, place: int, request_indices: Sequence[int] | None, *, fault: bool, lost: bool = False) -> str | None:
        """The place's engine died: see `CrashBlame.died`. All but its suspects may go on elsewhere.

        Returns the request that is convicted, if one is; it is still to be removed.
        """
        at = self._places[place]
        at.is_up = False
        self._note_places()
        self._router.lost(place)
        at.load.num_open = at.load.pending = 0
        at.pending.clear()
        at.begun.clear()
        for entry in self._at(place):
            entry.is_counted, entry.pending, entry.is_leaving = False, 0, False
        convict = at.blame.died(request_indices, fault=fault, lost=lost)
        self._touched.add(place)
        for request_id in at.blame.cleared:
            entry = self._entries[request_id]
            if self._takers(entry, besides=place):
                self._leave(entry)
                self._requeue(entry)
        return convict

    def release(self, place: int) -> None:
        """The place may be without an engine for long: its suspects, too, are queued if others could go on with them.

        Who takes one tries it alone, as the place's next engine would have done.
        """
        if not self._places[place].is_up:
            for entry in self._at(place):
                if self._takers(entry, besides=place):
                    self._leave(entry)
                    self._requeue(entry)

    def up(self, place: int, capacity: Capacity) -> None:
        """A new engine is up at a place. What it cannot go on with is queued."""
        at = self._places[place]
        at.capacity, at.is_up = capacity, True
        self._router.add_place(place, capacity.num_blocks, capacity.block_size)
        self._note_places()
        for entry in self._at(place):
            if not _takes(at, entry):
                self._leave(entry)
                self._requeue(entry)

    def drain(self, place: int) -> list[str]:
        """Begin nothing more here. Returns the requests that go on elsewhere; the others have to end here."""
        at = self._places[place]
        at.is_draining = True
        self._note_places()
        moved = []
        for entry in self._at(place):
            if entry.request.request_id in at.blame.suspects:
                continue
            if any(one.is_up for one in self._takers(entry, besides=place)):
                self._leave(entry)
                self._requeue(entry)
                moved.append(entry.request.request_id)
        return moved

    def is_needed(self, place: int) -> bool:
        """Whether a request is here, or can only go on here."""
        if self._at(place):
            return True
        return any(
            _takes(self._places[place], entry) and not self._takers(entry, besides=place)
            for entry in self._queue.in_order()
        )

    def remove_place(self, place: int) -> None:
        """No engine will be here again; what was here is queued."""
        for entry in self._at(place):
            self._leave(entry)
            self._requeue(entry)
        del self._places[place]
        self._touched.discard(place)
        self._note_places()
        self._router.remove_place(place)

    def _takers(self, entry: "_Entry", besides: int | None = None) -> list[_Place]:
        """The places that could go on with a request; those that drain only if no other could."""
        takers = [place for number, place in self._places.items() if number != besides and _takes(place, entry)]
        lasting = [place for place in takers if not place.is_draining]
        return lasting if lasting or besides is not None else takers

    def load_of(self, place: int) -> PlaceLoad:
        """What a place has to do."""
        return self._places[place].load

    def _at(self, place: int) -> list[_Entry]:
        """The requests of a place, in the order they came."""
        return [entry for entry in self._entries.values() if entry.place == place]

    # ── to and fro ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _note_places(self) -> None:
        """Places, or what they can do, have changed."""
        self._up = [place for place in self._places.values() if place.is_up]
        kinds = {id(place.capacity): place.capacity for place in self._places.values()}
        draining = any(place.is_draining for place in self._places.values())
        self._are_alike = not draining and len(set(kinds.values())) == 1

    def _assign(self) -> None:
        """Give places the requests that they have room for."""
        if len(self._places) == 1:
            (only,) = self._places.values()
            for entry in list(self._queue.in_order()) if only.is_up else ():
                if _takes(only, entry):
                    self._send(only, entry)
            return
        open_places = self._up
        if self._touched:
            open_places = [place for place in self._up if not place.blame.is_trying]
        if not any(place.has_room(None) for place in open_places):
            return
        ahead: list[tuple[PlaceLoad, int, int]] = []
        for entry in list(islice(self._queue.in_order(), MAX_CONSIDERED)):
            chosen = self._choose(entry, open_places)
            if chosen is None:
                continue
            if chosen.has_room(entry):
                self._send(chosen, entry)
            else:  # it waits for this one, and is ahead of those that come after it
                ahead.append((chosen.load, self._router.missing(entry.request, chosen.load.place), entry.num_sequences))
                chosen.load.pending += ahead[-1][1]
                chosen.load.num_open += entry.num_sequences
        for load, tokens, sequences in ahead:
            load.pending -= tokens
            load.num_open -= sequences

    def _choose(self, entry: _Entry, open_places: Sequence[_Place]) -> _Place | None:
        """The place that a request should go to, now or when it has room; None if there is none."""
        first = open_places[0] if open_places else None
        if first is not None and self._are_alike and _takes(first, entry):  # of a thousand places, not each is asked
            suitable = open_places
        else:
            takers = {place.load.place for place in self._takers(entry)}
            suitable = [place for place in open_places if place.load.place in takers]
        suitable = self._of_role(entry, suitable)
        if not self._router.may_wait:
            suitable = [place for place in suitable if place.has_room(entry)]
        if not suitable:
            return None
        entry.is_routed = True
        chosen = self._ask_router(entry, suitable)
        if not chosen.has_room(None):  # it may be long until an answer ends there: rather an engine that is half idle
            idle = [place for place in suitable if place.is_half_idle and place.has_room(entry)]
            chosen = self._ask_router(entry, idle) if idle else chosen
        return chosen

    def _of_role(self, entry: _Entry, places: Sequence[_Place]) -> Sequence[_Place]:
        """Those of the places that are for what the request needs next; all, if none is."""
        if all(place.capacity.role == "any" for place in places):
            return places
        others = [place for place in places if place.capacity.role != "prefill"]
        unwanted: Role = "prefill"
        if entry.arithmetic is None:
            entry.is_routed = True
            if not any(self._router.missing(entry.request, place.load.place) <= SHORT_PROMPT for place in others):
                unwanted = "decode"
        return [place for place in places if place.capacity.role != unwanted] or places

    def _ask_router(self, entry: _Entry, places: Sequence[_Place]) -> _Place:
        return self._places[self._router.choose(entry.request, [place.load for place in places])]

    def _send(self, place: _Place, entry: _Entry) -> None:
        self._queue.remove(entry)
        entry.place = place.load.place
        place.blame.add_request(entry.request.request_id, entry.case)
        entry.case = None
        self._touched.add(place.load.place)
        self._count(place, entry)

    def _count(self, place: _Place, entry: _Entry) -> None:
        """Make a request that is handed over part of its place's load."""
        if entry.is_counted:
            return
        entry.is_counted = True
        if len(self._places) == 1:  # there is nothing to choose
            entry.pending = len(entry.request.prompt_token_ids)
        else:
            entry.is_routed = True
            is_computed = entry.source is not None
            entry.pending = 1 if is_computed else self._router.missing(entry.request, place.load.place)
            self._router.sent(entry.request, place.load.place)
        place.load.num_open += entry.num_sequences
        place.load.pending += entry.pending
        place.pending[entry.account] = place.pending.get(entry.account, 0) + entry.pending
        if entry.arithmetic is None and len(self._places) > 1:
            self._queue.charge(entry, PROMPT_WEIGHT * entry.pending)

    def _settle(self, place: _Place, entry: _Entry) -> None:
        """Its prompt is computed, or will not be."""
        place.load.pending -= entry.pending
        left = place.pending[entry.account] - entry.pending
        if left:
            place.pending[entry.account] = left
        else:
            del place.pending[entry.account]
        entry.pending = 0

    def _leave(self, entry: _Entry) -> None:
        assert entry.place is not None
        place = self._places[entry.place]
        entry.case = place.blame.remove_request(entry.request.request_id)
        if entry.pending:
            self._settle(place, entry)
        if entry.is_counted:
            place.load.num_open -= entry.num_sequences
        entry.is_counted = False

    def _forget_route(self, entry: _Entry, answers: Sequence[Sequence[int]] = ()) -> None:
        if entry.is_routed:
            self._router.ended(entry.request.request_id, answers)
            entry.is_routed = False

    def _requeue(self, entry: _Entry) -> None:
        """Back to the queue, before all that was never handed over."""
        self._forget_route(entry)
        entry.place, entry.is_counted, entry.is_leaving, entry.source = None, False, False, None
        self._queue.push_back(entry)


def _takes(place: _Place, entry: _Entry) -> bool:
    """Whether a place could go on with the request."""
    return place.capacity.fits(entry.request) and entry.arithmetic in (None, place.capacity.arithmetic)


class _Queue:
    """Requests in the order in which they are to be handed over.

    First those that come back, by their arrival; then by a counter a tenant of the service it got (`FairQueue` in
    `core/fairness.py`, less its part for requests that ran), priority and arrival.
    """

    def __init__(self) -> None:
        self._returning: list[tuple[tuple[int, int], _Entry]] = []
        self._waiting: dict[str, list[tuple[tuple[int, int], _Entry]]] = {}
        self._counters: dict[str, int] = {}
        self._came_back: set[str] = set()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, entry: _Entry) -> None:
        tenant = entry.account[0]
        if tenant not in self._waiting:
            lowest = min((self._counters[name] for name in self._waiting), default=None)
            if lowest is None:  # no request waits: debts are forgiven
                self._counters.clear()
            self._counters[tenant] = max(self._counters.get(tenant, 0), lowest or 0)
            self._waiting[tenant] = []
        insort(self._waiting[tenant], (_key(entry), entry), key=_first)
        self._length += 1

    def push_back(self, entry: _Entry) -> None:
        insort(self._returning, ((0, entry.ordinal), entry), key=_first)
        self._came_back.add(entry.request.request_id)
        self._length += 1

    def remove(self, entry: _Entry) -> None:
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

    def charge(self, entry: _Entry, amount: int) -> None:
        """Charge the tenant for service, while any request waits."""
        if self._length:
            tenant = entry.account[0]
            self._counters[tenant] = self._counters.get(tenant, 0) + amount

    def in_order(self) -> Iterator[_Entry]:
        """As they would be handed over if that happened now. The queue may not change meanwhile."""
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


def _key(entry: _Entry) -> tuple[int, int]:
    return entry.account[1], entry.ordinal


def _first(pair: tuple[tuple[int, int], _Entry]) -> tuple[int, int]:
    return pair[0]
