"""Chooses the engine for a queued request, by each engine's limits and load, and the router.

    assign(queued) ──> (place, request) ──count──> in the place's load ──has_output──> its prompt is computed
                                                           └──────leave──────> out of the load

A place is an engine and its successors: a new engine at a place takes up the requests of the one that died there.
With one place every request goes to it at once. With several, a place is given a request only when its engine could
run it in one of the next steps, so that the choice is made as late as possible. Pure: no I/O and no clock.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.api.request import BlockSource, Request
from penstock.config.engine_config import Role
from penstock.fleet.crash_blame import Case
from penstock.fleet.router import PlaceLoad, Router

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
class FleetRequest:
    """One request of the fleet, queued or at a place."""

    request: Request
    account: tuple[str, int]
    """Tenant and priority, as far as the queue's policy uses them."""
    ordinal: int
    place: int | None = None
    arithmetic: str | None = None
    """The arithmetic of the engine that computed its first tokens; None before the first output."""
    is_counted: bool = False
    """Whether it is part of its place's load."""
    is_routed: bool = False
    """Whether the router knows it; a single place is chosen without the router."""
    is_leaving: bool = False
    """Whether its place was asked to hand it over."""
    source: BlockSource | None = None
    """Where its last place left the KV blocks of its tokens."""
    pending: int = 0
    """Its share of the place's pending prompt tokens."""
    case: Case | None = None
    """Record of a suspect that left its place, for its next place."""

    @property
    def num_sequences(self) -> int:
        return self.request.params.num_sequences


@dataclass(slots=True, eq=False)
class PlaceStatus:
    """The current engine of a place: its limits, state and load."""

    capacity: Capacity
    load: PlaceLoad
    is_up: bool = True
    is_draining: bool = False
    pending: dict[tuple[str, int], int] = field(default_factory=dict)
    """`load.pending` by account."""

    @property
    def number(self) -> int:
        return self.load.place

    @property
    def is_half_idle(self) -> bool:
        """Whether at most half of the engine's sequence slots are taken."""
        return 2 * self.load.num_open <= self.capacity.max_num_seqs

    @property
    def has_backlog(self) -> bool:
        """Whether its engine has prompts for more than the next steps."""
        return self.load.pending >= STEPS_AHEAD * self.capacity.max_num_batched_tokens

    def takes(self, entry: FleetRequest) -> bool:
        """Whether the place could start or continue the request."""
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
    """The places of a fleet and their loads, and the choice among them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.places: dict[int, PlaceStatus] = {}
        self._up: list[PlaceStatus] = []
        self._are_alike = True  # whether all places take the same requests

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_place(self, number: int, capacity: Capacity) -> None:
        """Add a place whose engine is up."""
        self.places[number] = PlaceStatus(capacity, PlaceLoad(number))
        self._router.add_place(number, capacity.num_blocks, capacity.block_size)
        self._note_places()

    def place_up(self, number: int, capacity: Capacity) -> None:
        """Note that a new engine is up at a place, with nothing cached."""
        place = self.places[number]
        place.capacity, place.is_up = capacity, True
        self._router.add_place(number, capacity.num_blocks, capacity.block_size)
        self._note_places()

    def place_down(self, number: int, requests: Iterable[FleetRequest]) -> None:
        """Note that a place's engine died, and with it all load; `requests` are those at the place."""
        place = self.places[number]
        place.is_up = False
        self._note_places()
        self._router.lost(number)
        place.load.num_open = place.load.pending = 0
        place.pending.clear()
        for entry in requests:
            entry.is_counted, entry.pending = False, 0

    def drain_place(self, number: int) -> None:
        """Assign no more requests to a place, unless no other takes them."""
        self.places[number].is_draining = True
        self._note_places()

    def remove_place(self, number: int) -> None:
        del self.places[number]
        self._note_places()
        self._router.remove_place(number)

    def _note_places(self) -> None:
        self._up = [place for place in self.places.values() if place.is_up]
        kinds = {id(place.capacity): place.capacity for place in self.places.values()}
        draining = any(place.is_draining for place in self.places.values())
        self._are_alike = not draining and len(set(kinds.values())) == 1

    def takers(self, entry: FleetRequest, besides: int | None = None) -> list[PlaceStatus]:
        """The places that could start or continue a request; draining ones only if there is no other.

        Args:
            besides: a place that is left out; then draining ones are left out, too.
        """
        takers = [place for number, place in self.places.items() if number != besides and place.takes(entry)]
        lasting = [place for place in takers if not place.is_draining]
        return lasting if lasting or besides is not None else takers

    # ── the choice ───────────────────────────────────────────────────────────────────────────────────────────────────

    def assign(
        self, queued: Iterable[FleetRequest], closed: Collection[int]
    ) -> Iterator[tuple[PlaceStatus, FleetRequest]]:
        """Yield the queued requests that can be handed over now, each with its place.

        The caller calls `count` for each before it takes the next.

        Args:
            closed: places that take no requests now, of several.
        """
        if len(self.places) == 1:
            (only,) = self.places.values()
            for entry in list(queued) if only.is_up else ():
                if only.takes(entry):
                    yield only, entry
            return
        open_places = [place for place in self._up if place.number not in closed] if closed else self._up
        if not any(place.has_room(None) for place in open_places):
            return
        reserved: list[tuple[PlaceLoad, int, int]] = []
        for entry in list(islice(queued, MAX_CONSIDERED)):  # a list: the caller removes what it is given from the queue
            chosen = self._choose(entry, open_places)
            if chosen is None:
                continue
            if chosen.has_room(entry):
                yield chosen, entry
            else:  # it waits for this place, and is ahead of the requests behind it in the queue
                reserved.append((chosen.load, self._router.missing(entry.request, chosen.number), entry.num_sequences))
                chosen.load.pending += reserved[-1][1]
                chosen.load.num_open += entry.num_sequences
        for load, tokens, sequences in reserved:  # reservations last for one call: the next one chooses again
            load.pending -= tokens
            load.num_open -= sequences

    def _choose(self, entry: FleetRequest, open_places: Sequence[PlaceStatus]) -> PlaceStatus | None:
        """The place that a request should go to, now or when it has room; None if there is none."""
        first = open_places[0] if open_places else None
        if first is not None and self._are_alike and first.takes(entry):  # spares asking each of a thousand places
            suitable = open_places
        else:
            takers = {place.number for place in self.takers(entry)}
            suitable = [place for place in open_places if place.number in takers]
        suitable = self._of_role(entry, suitable)
        if not self._router.may_wait:
            suitable = [place for place in suitable if place.has_room(entry)]
        if not suitable:
            return None
        entry.is_routed = True
        chosen = self._ask_router(entry, suitable)
        if not chosen.has_room(None):  # a slot may take long to become free: an engine that is half idle is better
            idle = [place for place in suitable if place.is_half_idle and place.has_room(entry)]
            chosen = self._ask_router(entry, idle) if idle else chosen
        return chosen

    def _of_role(self, entry: FleetRequest, places: Sequence[PlaceStatus]) -> Sequence[PlaceStatus]:
        """The places whose role is the request's next phase, prefill or decode; all if there are none."""
        if all(place.capacity.role == "any" for place in places):
            return places
        others = [place for place in places if place.capacity.role != "prefill"]
        unwanted: Role = "prefill"
        if entry.arithmetic is None:
            entry.is_routed = True
            if not any(self._router.missing(entry.request, place.number) <= SHORT_PROMPT for place in others):
                unwanted = "decode"
        return [place for place in places if place.capacity.role != unwanted] or places

    def _ask_router(self, entry: FleetRequest, places: Sequence[PlaceStatus]) -> PlaceStatus:
        return self.places[self._router.choose(entry.request, [place.load for place in places])]

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def count(self, place: PlaceStatus, entry: FleetRequest) -> bool:
        """Add a request that is handed over to its place's load; False if it is counted already."""
        if entry.is_counted:
            return False
        entry.is_counted = True
        if len(self.places) == 1:  # the router has no choice to make
            entry.pending = len(entry.request.prompt_token_ids)
        else:
            entry.is_routed = True
            # With a source, the engine loads the prompt's blocks, and about one token is left to compute.
            entry.pending = 1 if entry.source is not None else self._router.missing(entry.request, place.number)
            self._router.sent(entry.request, place.number)
        place.load.num_open += entry.num_sequences
        place.load.pending += entry.pending
        place.pending[entry.account] = place.pending.get(entry.account, 0) + entry.pending
        return True

    def has_output(self, place: PlaceStatus, entry: FleetRequest, num_cached_tokens: int) -> None:
        """Note a request's output; the first one says how many tokens of its prompt were cached."""
        if entry.pending:
            if entry.is_routed:
                self._router.found(entry.request.request_id, num_cached_tokens)
            self._settle(place, entry)

    def _settle(self, place: PlaceStatus, entry: FleetRequest) -> None:
        """Take a prompt that is computed, or will not be, out of its place's load."""
        place.load.pending -= entry.pending
        left = place.pending[entry.account] - entry.pending
        if left:
            place.pending[entry.account] = left
        else:
            del place.pending[entry.account]
        entry.pending = 0

    def leave(self, place: PlaceStatus, entry: FleetRequest) -> None:
        """Take a request out of its place's load."""
        if entry.pending:
            self._settle(place, entry)
        if entry.is_counted:
            place.load.num_open -= entry.num_sequences
        entry.is_counted = False

    def forget_route(self, entry: FleetRequest, answers: Sequence[Sequence[int]] = ()) -> None:
        """Have the router forget a request; `answers` are its tokens if it ended at its place."""
        if entry.is_routed:
            self._router.ended(entry.request.request_id, answers)
            entry.is_routed = False
