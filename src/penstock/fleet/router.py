"""Routers, which choose the engine for a request. Pure: no I/O, no clock; equal calls give equal results.

    choose(request, loads) ──> place      sent(request, place)      found(request_id, ...)      ended(request_id, ...)

`PrefixRouter` estimates which blocks each place has cached. It keeps a shadow of each prefix cache: hashes of the
blocks of all requests sent there, as many as the engine has blocks, evicted least recently used first. `found` corrects
the shadow by the number of cached tokens that the engine reports. A hash collision costs a cache miss, never an answer.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol
from zlib import crc32

from penstock.api.request import Request
from penstock.core.prefix_cache import cache_namespace

MAX_SCANNED = 16
"""Maximum places to compare. Of more, half of this many with the longest cached prefixes, and random others."""


@dataclass(slots=True)
class PlaceLoad:
    """Load of a place, as the router weighs it."""

    place: int
    num_open: int = 0
    """Sequences that were handed over and have not ended."""
    pending: int = 0
    """Estimate of their prompt tokens that are still to be computed."""


class Router(Protocol):
    """Chooses a place for a request. Places are numbers that are not reused."""

    may_wait: bool
    """Whether a request may wait for its best place while others have room."""

    def add_place(self, place: int, num_blocks: int, block_size: int) -> None:
        """Note that an engine is up at a place, with nothing cached."""

    def remove_place(self, place: int) -> None:
        """Forget a place."""

    def lost(self, place: int) -> None:
        """Note that a place's engine died, and its cache with it."""

    def choose(self, request: Request, loads: Sequence[PlaceLoad]) -> int:
        """The best place for the request now; `loads` has at least one."""

    def missing(self, request: Request, place: int) -> int:
        """Estimate of the prompt tokens that the place would have to compute; at least 1."""

    def sent(self, request: Request, place: int) -> None:
        """Note that a request was handed over to a place."""

    def found(self, request_id: str, num_cached_tokens: int) -> None:
        """Note how many tokens of a request's prompt were cached, from its first output."""

    def ended(self, request_id: str, answers: Sequence[Sequence[int]] = ()) -> None:
        """Note that a request has left its place or the queue; `answers` are its tokens if it ended at the place."""


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
    """The place with the fewest open sequences; equal places take turns."""

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
    """A request that the router knows: its blocks' keys and, once sent, the blocks that were expected to be cached."""

    request: Request
    chains: dict[int, list[int]] = field(default_factory=dict)
    """Keys of its prompt's full blocks, by block size."""
    place: int | None = None
    ticket: int = 0
    touched: list[int] = field(default_factory=list)
    """Ticket of the last request that touched each block that was expected to be cached."""


class PrefixRouter:
    """The place with the lowest (prompt tokens to compute there, pending ones included) * (open sequences + 1).

    The product needs no weights that depend on model and machine: the more sequences share a place's steps, the more of
    them each prompt token delays. Ties, as between idle places that have nothing of the prompt cached, go to the place
    with the most free blocks, or with the least recently used oldest block, so that recently used blocks stay cached.
    """

    may_wait = True

    def __init__(self, seed: int = 0) -> None:
        """
        Args:
            seed: for the random candidates when there are more than `MAX_SCANNED` places.
        """
        self._shadows: dict[int, _Shadow] = {}
        self._block_sizes: set[int] = set()
        self._holders: dict[int, int] = {}  # block key -> bit set of the places that have the block
        self._sent: dict[str, _Sent] = {}
        self._unconfirmed: set[int] = (
            set()
        )  # tickets of requests without an output, whose blocks may not be computed yet
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
        """Cost of a new block: minus the number of free blocks or, if there are none, the age of the one to evict."""
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
        """Estimate of cached prompt tokens, for the places that have any."""
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
        for key in chain[
            : (len(request.prompt_token_ids) - 1) // shadow.block_size
        ]:  # the last token is always computed
            if key not in shadow.blocks:
                break
            known.touched.append(shadow.blocks[key])
        self._num_tickets += 1
        self._unconfirmed.add(known.ticket)
        self._touch(place, shadow, chain, known.ticket)

    def _touch(self, place: int, shadow: _Shadow, chain: Sequence[int], ticket: int) -> None:
        for key in reversed(chain):  # the deepest blocks are evicted first, as in the engine
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
        """Evict from the shadow the blocks that were not found, and all older ones: the engine evicts oldest first."""
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
    """Yield the key of each full block of `tokens`, which follow the prefix that `key` stands for."""
    for end in range(block_size, len(tokens) + 1, block_size):
        key = hash((key, *tokens[end - block_size : end]))
        yield key


def _note(cached: dict[int, int], places: int, num_tokens: int) -> None:
    """Set the cached tokens of each place in a bit set."""
    while places:
        lowest = places & -places
        cached[lowest.bit_length() - 1] = num_tokens
        places ^= lowest


ROUTERS: dict[str, Callable[[], Router]] = {
    "prefix": PrefixRouter,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}
