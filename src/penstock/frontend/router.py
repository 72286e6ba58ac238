"""Which engine a request goes to. Pure: no I/O, no clock, and the same calls give the same answers.

    choose(request, loads) ──> place      sent(request, place)      found(request_id, ...)      ended(request_id, ...)

`PrefixRouter` guesses which blocks each place has cached. It keeps a shadow of each prefix cache: the blocks of what
was sent there, by their tokens' hashes, as many as the engine has, least recently used first out. `found` corrects it
by what the engine says it had. A hash that collides costs a miss, never an answer.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol
from zlib import crc32

from penstock.core.prefix_cache import cache_namespace
from penstock.request import Request

MAX_SCANNED = 16
"""Places that are all compared; of more, half as many that hold the longest parts of the prompt, and random others."""


@dataclass(slots=True)
class PlaceLoad:
    """Load of a place, as the router weighs it."""

    place: int
    num_open: int = 0
    """Sequences that were handed over and have not ended."""
    pending: int = 0
    """Prompt tokens of theirs that are still to be computed, by the router's estimate."""


class Router(Protocol):
    """Chooses among places, which are numbers that are not used again."""

    may_wait: bool
    """Whether a request may wait for the place that suits it while others have room."""

    def add_place(self, place: int, num_blocks: int, block_size: int) -> None:
        """An engine is up here, with nothing cached."""

    def remove_place(self, place: int) -> None:
        """No engine will be here again."""

    def lost(self, place: int) -> None:
        """The engine here died, and what it had cached is gone."""

    def choose(self, request: Request, loads: Sequence[PlaceLoad]) -> int:
        """The best place for the request now; `loads` has at least one."""

    def missing(self, request: Request, place: int) -> int:
        """Prompt tokens that the place would have to compute; 1 at least."""

    def sent(self, request: Request, place: int) -> None:
        """The request was handed over to this place."""

    def found(self, request_id: str, num_cached_tokens: int) -> None:
        """A request that was sent has its first output; of its prompt so many tokens were cached."""

    def ended(self, request_id: str, answers: Sequence[Sequence[int]] = ()) -> None:
        """A request has left its place, or the queue; with the tokens of its answers, if it ended there."""


class RoundRobin:
    """Each place in turn."""

    may_wait = False

    def __init__(self) -> None:
        self._last = -1

    def add_place(self, place: int, num_blocks: int, block_size: int) -> None:
        return None

    def remove_place(self, place: int) -> None:
        return None

    def lost(self, place: int) -> None:
        return None

    def choose(self, request: Request, loads: Sequence[PlaceLoad]) -> int:
        return min((load.place <= self._last, load.place) for load in loads)[1]

    def missing(self, request: Request, place: int) -> int:
        return len(request.prompt_token_ids)

    def sent(self, request: Request, place: int) -> None:
        self._last = place

    def found(self, request_id: str, num_cached_tokens: int) -> None:
        return None

    def ended(self, request_id: str, answers: Sequence[Sequence[int]] = ()) -> None:
        return None


class LeastLoaded(RoundRobin):
    """The place with the fewest open sequences; of equal ones, each in turn."""

    def choose(self, request: Request, loads: Sequence[PlaceLoad]) -> int:
        return min((load.num_open, load.place <= self._last, load.place) for load in loads)[2]


@dataclass(slots=True)
class _Shadow:
    """Estimate of a place's cached blocks: a block's key and the request that touched it last, oldest first."""

    num_blocks: int
    block_size: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Sent:
    """A request that is known here: its blocks' keys and, once sent, what was expected to be cached."""

    request: Request
    chains: dict[int, list[int]] = field(default_factory=dict)
    """The keys of its prompt's whole blocks, by the block size."""
    place: int | None = None
    ticket: int = 0
    touched: list[int] = field(default_factory=list)
    """Of each block that was expected to be cached: who had touched it last."""


class PrefixRouter:
    """The place with the least of (prompt tokens to compute there, its own and others') times (sequences there + 1).

    The product needs no weights that depend on model and machine: the more sequences share a place's steps, the longer
    each token of a prompt holds all of them up. Of equal places, as those that are idle and know nothing of a prompt,
    it is the one that has free blocks, or whose oldest ones were used longest ago, so all keep what was used since.
    """

    may_wait = True

    def __init__(self, seed: int = 0) -> None:
        """
        Args:
            seed: of the choice of candidates where there are very many places.
        """
        self._shadows: dict[int, _Shadow] = {}
        self._block_sizes: set[int] = set()
        self._holders: dict[int, int] = {}  # of each block's key: the places that have it, a bit each
        self._sent: dict[str, _Sent] = {}
        self._unconfirmed: set[int] = set()  # tickets of requests without an output: their blocks may not be there yet
        self._num_tickets = 0
        self._random = Random(seed)

    def add_place(self, place: int, num_blocks: int, block_size: int) -> None:
        self.lost(place)
        self._shadows[place] = _Shadow(num_blocks, block_size)
        self._block_sizes = {shadow.block_size for shadow in self._shadows.values()}

    def remove_place(self, place: int) -> None:
        self.lost(place)
        self._shadows.pop(place, None)
        self._block_sizes = {shadow.block_size for shadow in self._shadows.values()}

    def lost(self, place: int) -> None:
        shadow = self._shadows.get(place)
        if shadow is not None:
            for key in shadow.blocks:
                self._drop_holder(key, place)
            shadow.blocks.clear()

    def choose(self, request: Request, loads: Sequence[PlaceLoad]) -> int:
        cached = self._cached(request)
        if len(loads) > MAX_SCANNED:
            loads = self._candidates(cached, loads)
        length = len(request.prompt_token_ids)

        def cost(load: PlaceLoad) -> tuple[int, int, int, int]:
            tokens = max(1, length - cached.get(load.place, 0)) + load.pending
            return tokens * (load.num_open + 1), load.num_open, self._loss(load.place), load.place

        return min(loads, key=cost).place

    def _loss(self, place: int) -> int:
        """Less where a new block costs less: by the number of free ones, and then by who touched last what must go."""
        shadow = self._shadows[place]
        free = shadow.num_blocks - len(shadow.blocks)
        return -free if free else next(iter(shadow.blocks.values()))

    def _candidates(self, cached: dict[int, int], loads: Sequence[PlaceLoad]) -> list[PlaceLoad]:
        most = MAX_SCANNED // 2
        holders = sorted(cached, key=lambda place: (-cached[place], place))[:most]
        chosen = {load.place: load for load in self._random.sample(loads, most)}
        if holders:
            wanted = set(holders)
            chosen |= {load.place: load for load in loads if load.place in wanted}
        return list(chosen.values())

    def missing(self, request: Request, place: int) -> int:
        return max(1, len(request.prompt_token_ids) - self._cached(request).get(place, 0))

    def _cached(self, request: Request) -> dict[int, int]:
        """Prompt tokens that are likely cached, by the places that have any."""
        known = self._known(request)
        cached: dict[int, int] = {}
        for block_size in self._block_sizes:
            alive = -1
            for depth, key in enumerate(self._chain(known, block_size)):
                holders = alive & self._holders.get(key, 0)
                if depth:
                    _note(cached, alive & ~holders, depth * block_size)
                alive = holders
                if not alive:
                    break
            else:
                depth = len(self._chain(known, block_size))
                _note(cached, alive if depth else 0, depth * block_size)
        return cached

    def _known(self, request: Request) -> _Sent:
        known = self._sent.get(request.request_id)
        if known is None:
            known = self._sent[request.request_id] = _Sent(request)
        return known

    def _chain(self, known: _Sent, block_size: int) -> list[int]:
        chain = known.chains.get(block_size)
        if chain is None:
            first = hash((crc32(cache_namespace(known.request).encode()), block_size))
            chain = known.chains[block_size] = list(_keys(first, known.request.prompt_token_ids, block_size))
        return chain

    def sent(self, request: Request, place: int) -> None:
        shadow, known = self._shadows[place], self._known(request)
        chain = self._chain(known, shadow.block_size)
        known.place, known.ticket, known.touched = place, self._num_tickets, []
        for key in chain[: (len(request.prompt_token_ids) - 1) // shadow.block_size]:  # its last token is computed
            if key not in shadow.blocks:
                break
            known.touched.append(shadow.blocks[key])
        self._num_tickets += 1
        self._unconfirmed.add(known.ticket)
        self._touch(place, shadow, chain, known.ticket)

    def _touch(self, place: int, shadow: _Shadow, chain: Sequence[int], ticket: int) -> None:
        for key in reversed(chain):  # the deepest are given up first, as in the engine
            if key not in shadow.blocks:
                self._holders[key] = self._holders.get(key, 0) | 1 << place
            shadow.blocks[key] = ticket
            shadow.blocks.move_to_end(key)
        while len(shadow.blocks) > shadow.num_blocks:
            self._drop_holder(shadow.blocks.popitem(last=False)[0], place)

    def _drop_holder(self, key: int, place: int) -> None:
        left = self._holders[key] & ~(1 << place)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def found(self, request_id: str, num_cached_tokens: int) -> None:
        """What is missing was given up, and so was, as the engine gives up the oldest first, what is older."""
        known = self._sent.get(request_id)
        if known is None or known.place is None or known.ticket not in self._unconfirmed:
            return
        self._unconfirmed.remove(known.ticket)
        shadow = self._shadows.get(known.place)
        if shadow is None:
            return
        num_found = num_cached_tokens // shadow.block_size
        if num_found >= len(known.touched) or known.touched[num_found] in self._unconfirmed:
            return
        oldest_left = known.touched[num_found]
        while shadow.blocks and next(iter(shadow.blocks.values())) <= oldest_left:
            self._drop_holder(shadow.blocks.popitem(last=False)[0], known.place)

    def ended(self, request_id: str, answers: Sequence[Sequence[int]] = ()) -> None:
        known = self._sent.pop(request_id, None)
        if known is None or known.place is None:
            return
        self._unconfirmed.discard(known.ticket)
        shadow = self._shadows.get(known.place)
        if shadow is None:
            return
        prompt, size = known.request.prompt_token_ids, shadow.block_size
        chain = self._chain(known, size)
        for answer in answers:
            last = chain[-1] if chain else hash((crc32(cache_namespace(known.request).encode()), size))
            rest = (*prompt[len(chain) * size :], *answer[:-1])  # the last token is never computed
            keys = list(_keys(last, rest, size))
            if keys:
                self._touch(known.place, shadow, [*chain, *keys], self._num_tickets)
                self._num_tickets += 1


def _keys(key: int, tokens: Sequence[int], block_size: int) -> Iterator[int]:
    """The key of each whole block of `tokens`, which follow those that `key` stands for."""
    for end in range(block_size, len(tokens) + 1, block_size):
        key = hash((key, *tokens[end - block_size : end]))
        yield key


def _note(cached: dict[int, int], places: int, num_tokens: int) -> None:
    """Note for each of these places, a bit each, that it has so many tokens."""
    while places:
        lowest = places & -places
        cached[lowest.bit_length() - 1] = num_tokens
        places ^= lowest


ROUTERS: dict[str, Callable[[], Router]] = {
    "prefix": PrefixRouter,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}
