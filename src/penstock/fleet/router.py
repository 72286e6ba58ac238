"""Routers, which choose the engine for a request. Pure: no I/O, no clock; equal calls give equal results.

    choose(route, loads) ──> replica        sent(route, replica)        found(route, ...)        ended(route, ...)

`PrefixRouter` estimates which blocks each replica has cached. It keeps a shadow of each prefix cache: hashes of the
blocks of all requests sent there, as many as the engine has blocks, evicted least recently used first. `found` corrects
the shadow by the number of cached tokens that the engine reports. A hash collision costs a cache miss, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from random import Random
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

from penstock.api.request import Image
from penstock.core.block_keys import image_content
from penstock.core.prefix_cache import cache_namespace
from penstock.dataclass import dataclass

if TYPE_CHECKING:
    from penstock.fleet.request import Route

MAX_SCANNED = 16
"""Maximum replicas to compare. Of more, half of this many with the longest cached prefixes, and random others."""


@dataclass(slots=True)
class ReplicaLoad:
    """Load of a replica, as the router weighs it."""

    replica: int
    num_open: int = 0
    """Sequences that were handed over and have not ended."""
    pending: int = 0
    """Estimate of their prompt tokens that are still to be computed."""


class Router(Protocol):
    """Chooses a replica for a request. Replicas are numbers that are not reused."""

    may_wait: bool
    """Whether a request may wait for its best replica while others have room."""

    def add_replica(self, replica: int, num_blocks: int, block_size: int) -> None:
        """Note that an engine is up at a replica, with nothing cached."""

    def remove_replica(self, replica: int) -> None:
        """Forget a replica."""

    def lost(self, replica: int) -> None:
        """Note that a replica's engine died, and its cache with it."""

    def choose(self, route: Route, loads: Sequence[ReplicaLoad]) -> int:
        """The best replica for the request now; `loads` has at least one."""

    def missing(self, route: Route, replica: int) -> int:
        """Estimate of the prompt tokens that the replica would have to compute; at least 1."""

    def sent(self, route: Route, replica: int) -> None:
        """Note that a request was handed over to a replica."""

    def found(self, route: Route, num_cached_tokens: int) -> None:
        """Note how many tokens of a request's prompt were cached, from its first output."""

    def ended(self, route: Route, answers: Sequence[Sequence[int]] = ()) -> None:
        """Note that a request has left its replica or the queue; `answers` are its tokens if it ended there."""


class RoundRobin:
    """Each replica in turn."""

    may_wait = False

    def __init__(self) -> None:
        self._last = -1

    def add_replica(self, replica: int, num_blocks: int, block_size: int) -> None:
        return None

    def remove_replica(self, replica: int) -> None:
        return None

    def lost(self, replica: int) -> None:
        return None

    def choose(self, route: Route, loads: Sequence[ReplicaLoad]) -> int:
        return min((load.replica <= self._last, load.replica) for load in loads)[1]

    def missing(self, route: Route, replica: int) -> int:
        return len(route.request.prompt_token_ids)

    def sent(self, route: Route, replica: int) -> None:
        self._last = replica

    def found(self, route: Route, num_cached_tokens: int) -> None:
        return None

    def ended(self, route: Route, answers: Sequence[Sequence[int]] = ()) -> None:
        return None


class LeastLoaded(RoundRobin):
    """The replica with the fewest open sequences; equal replicas take turns."""

    def choose(self, route: Route, loads: Sequence[ReplicaLoad]) -> int:
        return min((load.num_open, load.replica <= self._last, load.replica) for load in loads)[2]


@dataclass(slots=True)
class _Shadow:
    """Estimate of a replica's cached blocks: a block's key and the request that touched it last, oldest first."""

    num_blocks: int
    block_size: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)


class PrefixRouter:
    """The replica with the lowest (prompt tokens to compute there, pending ones included) * (open sequences + 1).

    The product needs no weights that depend on model and machine: the more sequences share a replica's steps, the more
    of them each prompt token delays. Ties, as between idle replicas that have nothing of the prompt cached, go to the
    replica with the most free blocks, or with the least recently used oldest block: recently used blocks stay cached.
    """

    may_wait = True

    def __init__(self, seed: int = 0) -> None:
        """
        Args:
            seed: for the random candidates when there are more than `MAX_SCANNED` replicas.
        """
        self._shadows: dict[int, _Shadow] = {}
        self._block_sizes: set[int] = set()
        self._holders: dict[int, int] = {}  # block key -> bit set of the replicas that have the block
        self._unconfirmed: set[int] = set()  # tickets of requests without an output: blocks may not be computed yet
        self._num_tickets = 0
        self._random = Random(seed)

    def add_replica(self, replica: int, num_blocks: int, block_size: int) -> None:
        self.lost(replica)
        self._shadows[replica] = _Shadow(num_blocks, block_size)
        self._block_sizes = {shadow.block_size for shadow in self._shadows.values()}

    def remove_replica(self, replica: int) -> None:
        self.lost(replica)
        self._shadows.pop(replica, None)
        self._block_sizes = {shadow.block_size for shadow in self._shadows.values()}

    def lost(self, replica: int) -> None:
        shadow = self._shadows.get(replica)
        if shadow is not None:
            for key in shadow.blocks:
                self._drop_holder(key, replica)
            shadow.blocks.clear()

    def choose(self, route: Route, loads: Sequence[ReplicaLoad]) -> int:
        cached = self._cached(route)
        if len(loads) > MAX_SCANNED:
            loads = self._candidates(cached, loads)
        length = len(route.request.prompt_token_ids)

        def cost(load: ReplicaLoad) -> tuple[int, int, int, int]:
            tokens = max(1, length - cached.get(load.replica, 0)) + load.pending
            return tokens * (load.num_open + 1), load.num_open, self._loss(load.replica), load.replica

        return min(loads, key=cost).replica

    def _loss(self, replica: int) -> int:
        """Cost of a new block: minus the number of free blocks or, if there are none, the age of the one to evict."""
        shadow = self._shadows[replica]
        free = shadow.num_blocks - len(shadow.blocks)
        return -free if free else next(iter(shadow.blocks.values()))

    def _candidates(self, cached: dict[int, int], loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
        most = MAX_SCANNED // 2
        holders = sorted(cached, key=lambda replica: (-cached[replica], replica))[:most]
        chosen = {load.replica: load for load in self._random.sample(loads, most)}
        if holders:
            wanted = set(holders)
            chosen |= {load.replica: load for load in loads if load.replica in wanted}
        return list(chosen.values())

    def missing(self, route: Route, replica: int) -> int:
        return max(1, len(route.request.prompt_token_ids) - self._cached(route).get(replica, 0))

    def _cached(self, route: Route) -> dict[int, int]:
        """Estimate of cached prompt tokens, for the replicas that have any."""
        cached: dict[int, int] = {}
        for block_size in self._block_sizes:
            # All bits: every replica may hold the first block.
            alive = -1
            for depth, key in enumerate(self._chain(route, block_size)):
                holders = alive & self._holders.get(key, 0)
                if depth:
                    _note(cached, alive & ~holders, depth * block_size)
                alive = holders
                if not alive:
                    break
            else:
                depth = len(self._chain(route, block_size))
                _note(cached, alive if depth else 0, depth * block_size)
        return cached

    def _chain(self, route: Route, block_size: int) -> list[int]:
        chain = route.chains.get(block_size)
        if chain is None:
            first = hash((crc32(cache_namespace(route.request).encode()), block_size))
            keys = _keys(first, route.request.prompt_token_ids, block_size, route.request.images)
            chain = route.chains[block_size] = list(keys)
        return chain

    def sent(self, route: Route, replica: int) -> None:
        shadow = self._shadows[replica]
        chain = self._chain(route, shadow.block_size)
        route.replica, route.ticket, route.touched = replica, self._num_tickets, []
        num_prompt_tokens = len(route.request.prompt_token_ids)
        for key in chain[: (num_prompt_tokens - 1) // shadow.block_size]:  # the last token is always computed
            if key not in shadow.blocks:
                break
            route.touched.append(shadow.blocks[key])
        self._num_tickets += 1
        self._unconfirmed.add(route.ticket)
        self._touch(replica, shadow, chain, route.ticket)

    def _touch(self, replica: int, shadow: _Shadow, chain: Sequence[int], ticket: int) -> None:
        for key in reversed(chain):  # the deepest blocks are evicted first, as in the engine
            if key not in shadow.blocks:
                self._holders[key] = self._holders.get(key, 0) | 1 << replica
            shadow.blocks[key] = ticket
            shadow.blocks.move_to_end(key)
        while len(shadow.blocks) > shadow.num_blocks:
            self._drop_holder(shadow.blocks.popitem(last=False)[0], replica)

    def _drop_holder(self, key: int, replica: int) -> None:
        left = self._holders[key] & ~(1 << replica)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def found(self, route: Route, num_cached_tokens: int) -> None:
        """Evict from the shadow the blocks that were not found, and all older ones: the engine evicts oldest first."""
        if route.replica is None or route.ticket not in self._unconfirmed:
            return
        self._unconfirmed.remove(route.ticket)
        shadow = self._shadows.get(route.replica)
        if shadow is None:
            return
        num_found = num_cached_tokens // shadow.block_size
        # A block that another request without an output was to compute may be missing only because it is not computed
        # yet.
        if num_found >= len(route.touched) or route.touched[num_found] in self._unconfirmed:
            return
        oldest_left = route.touched[num_found]
        while shadow.blocks and next(iter(shadow.blocks.values())) <= oldest_left:
            self._drop_holder(shadow.blocks.popitem(last=False)[0], route.replica)

    def ended(self, route: Route, answers: Sequence[Sequence[int]] = ()) -> None:
        if route.replica is None:
            return
        self._unconfirmed.discard(route.ticket)
        shadow = self._shadows.get(route.replica)
        if shadow is None:
            return
        prompt, size = route.request.prompt_token_ids, shadow.block_size
        chain = self._chain(route, size)
        for answer in answers:
            last = chain[-1] if chain else hash((crc32(cache_namespace(route.request).encode()), size))
            known = len(chain) * size
            rest = (*prompt[known:], *answer[:-1])  # the last token is never computed
            keys = list(_keys(last, rest, size, route.request.images, known))
            if keys:
                self._touch(route.replica, shadow, [*chain, *keys], self._num_tickets)
                self._num_tickets += 1


def _keys(key: int, tokens: Sequence[int], block_size: int, images: Sequence[Image], known: int = 0) -> Iterator[int]:
    """Yield the key of each full block of `tokens`, which follow `known` tokens, the prefix that `key` stands for."""
    for end in range(block_size, len(tokens) + 1, block_size):
        key = hash((key, *tokens[end - block_size : end]))
        if images and (content := image_content(images, known + end - block_size, known + end)):
            key = hash((key, crc32(content)))
        yield key


def _note(cached: dict[int, int], replicas: int, num_tokens: int) -> None:
    """Set the cached tokens of each replica in a bit set."""
    while replicas:
        lowest = replicas & -replicas
        cached[lowest.bit_length() - 1] = num_tokens
        replicas ^= lowest


ROUTERS: dict[str, Callable[[], Router]] = {
    "prefix": PrefixRouter,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}
