"""The tier below the prefix cache: blocks in a file, and in the files of other engines.

    prefix tree ──computed──> write ──> the file                     a step's new blocks; threads write, steps go on
                <──inserted── load  <── the file, or a peer's        before a waiting sequence is admitted

A block in the tree never changes, so it is written from where it lies; were it evicted meanwhile, what was written is
given up. Blocks are written as soon as they are computed, so evicting one costs nothing, and the end of a process
loses nothing. A record is only written once its block is: what a slot holds is what its record says, or else the
checksum fails.

A sequence at the head of the queue, whose text goes on in a file beyond the tree, waits for a load: its blocks are
taken from the pool, filled by threads and inserted as computed ones. What cannot be read is computed. Nothing here
waits: `poll`, between steps, looks at what the threads have done.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import takewhile

from penstock.core.block_writer import MAIN, BlockAddress, BlockIO, BlockWriter, TierStats
from penstock.core.kv_manager import KVManager
from penstock.core.prefix_cache import NO_BLOCK, Node, cache_namespace
from penstock.core.sequence import INT32, Sequence
from penstock.core.stored_blocks import State, StoredBlock, StoredTree, path_digest, root_digest
from penstock.request import BlockSource

LOAD_SECONDS = 10.0
"""After which a sequence goes on without what it waits for."""


@dataclass(slots=True, eq=False)
class _Place:
    """A block of a text: where it is in files, and what of it is on its way to the pool."""

    address: BlockAddress | None
    stored: StoredBlock | None
    """What it is in the engine's own file, if it is in that."""
    blocks: dict[int, int]
    """To be filled, by cache group."""
    read: "dict[int, Future[bool]]"
    spare: int = NO_BLOCK
    """A block of the main group that is held meanwhile, where only others' are filled."""

    @property
    def takes_spare(self) -> bool:
        """So that loads, as sequences, have a block of a group only where they have one of the main group.

        Hence a group that has as many blocks as the main one never runs short (`memory.layer_groups`).
        """
        return bool(self.blocks) and MAIN not in self.blocks


@dataclass(slots=True, eq=False)
class _Load:
    """Blocks of a path of the tree that are held, and those that it lacks, or that go on from it."""

    path: list[Node]
    node: Node
    """The path's end, or the root."""
    held: list[tuple[int, int]]
    """Cache groups and blocks of the tree, shallow ones first."""
    places: list[_Place]
    """From the text's first block on."""
    began: float

    @property
    def read(self) -> "list[Future[bool]]":
        return [read for place in self.places for read in place.read.values()]

    @property
    def is_done(self) -> bool:
        return all(one.done() for one in self.read)


class BlockTier:
    """Loads blocks for waiting sequences, and has a `BlockWriter` write those that are computed."""

    def __init__(
        self, kv: KVManager, tree: StoredTree, io: BlockIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stats = TierStats(tree.num_slots)
        self.tree = tree
        self._kv, self._io, self._clock = kv, io, clock
        self._writer = BlockWriter(tree, io, self.stats, len(kv.pools))
        self._loads: dict[int, _Load] = {}  # by the sequence that waits
        self._sources: dict[str, BlockSource] = {}
        self._exports: deque[tuple[str, list[StoredBlock], float]] = deque()
        self._late: set[int] = set()  # sequences that go on without their load
        self._groups = range(len(kv.pools))
        kv.cache.listener = self

    def computed(self, node: Node) -> None:
        """See `Listener`."""
        self._writer.computed(node)

    def forgotten(self, group: int, block: int) -> None:
        """See `Listener`."""
        self._writer.forgotten(group, block)

    def poll(self) -> None:
        """Take note of what the threads have done. Between steps."""
        self._writer.poll()
        for sequence_id, load in list(self._loads.items()):
            if load.is_done:
                del self._loads[sequence_id]
                self._late.discard(sequence_id)
                self._insert(load)
        self.stats.stored = len(self.tree)

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, request_id: str, source: BlockSource) -> None:
        """Another engine has computed the request's prompt."""
        self._sources[request_id] = source

    def ended(self, request_id: str) -> None:
        """The request needs its source no longer."""
        self._sources.pop(request_id, None)

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def ready(self, seq: Sequence, reserve: int) -> bool:
        """Whether a waiting sequence may be admitted: False while it waits for a load, which this begins.

        `reserve` blocks must stay available besides; where they do not, the sequence cannot be admitted anyway.
        """
        load = self._loads.get(seq.sequence_id)
        if load is not None:
            return self._is_late(seq.sequence_id, load)
        path = self._kv.known_path(seq)
        self.tree.touch(node.stored for node in path if node.stored is not None)
        places = self._find(seq, path) if not self._late else []
        if not places or not self._has_room(seq, path[: len(places)], places, reserve):
            return True
        self._begin(seq, path[: len(places)], places)
        return False

    def _has_room(self, seq: Sequence, path: list[Node], places: list[_Place], reserve: int) -> bool:
        """Whether the pools have the blocks that a load takes, and the sequence could then be admitted."""
        known = [node for node in path if node.blocks[MAIN] != NO_BLOCK]
        spares = sum(place.takes_spare for place in places)
        if self._kv.num_needed(seq, known) + spares + reserve > self._kv.num_available:
            return False
        for group in self._groups[1:]:  # a quarter is what running sequences cannot need (`memory.layer_groups`)
            most, total = self._kv.pools[group].num_blocks, self._kv.pool.num_blocks
            taken = sum(1 for _ in self.held_blocks(group)) + self.num_seen(group, len(places))
            if most < total and taken > total // 4:
                return False
        return True

    def num_seen(self, group: int, depth: int) -> int:
        """Blocks of a group that are needed to go on after the first `depth` of a text."""
        return depth - self._kv.first_seen(group, depth * self._kv.block_size)

    def _is_late(self, sequence_id: int, load: _Load) -> bool:
        if self._clock() - load.began <= LOAD_SECONDS:
            return False
        if sequence_id not in self._late:
            self._late.add(sequence_id)
            self.stats.late += 1
        return True

    def _find(self, seq: Sequence, path: list[Node]) -> list[_Place]:
        """The blocks of the sequence's text up to where it could go on after a load, with those to be loaded.

        None where the tree alone leads as far.
        """
        size, namespace = self._kv.block_size, cache_namespace(seq.request)
        most = seq.num_reusable // size
        stored = self.tree.match(namespace, seq.tokens, size, most)
        self.tree.touch(stored)
        found = [(BlockAddress(one.slot, one.digest, one.key), one, one.groups) for one in stored]
        places = [_Place(address, one, {}, {}) for address, one, _ in found]
        groups = [groups for _, _, groups in found]
        source = self._sources.get(seq.request_id)
        if source is not None:
            for address, bits in _addresses(source, namespace, seq.tokens[: most * size], size, len(places)):
                places.append(_Place(address, None, {}, {}))
                groups.append(bits)
        for _ in range(len(places), len(path)):
            places.append(_Place(None, None, {}, {}))
            groups.append(0)
        known = [[block != NO_BLOCK for block in node.blocks] for node in path]
        known += [[False] * len(self._groups) for _ in range(len(path), len(places))]
        usable = self._kv.usable(
            [
                [there or bool(bits >> group & 1) for group, there in enumerate(has)]
                for has, bits in zip(known, groups, strict=True)
            ]
        )
        if usable <= self._kv.usable(known):
            return []
        for group in self._groups:
            for depth in range(usable - self.num_seen(group, usable), usable):
                if not known[depth][group]:
                    places[depth].blocks[group] = NO_BLOCK
        return places[:usable]

    def _begin(self, seq: Sequence, path: list[Node], places: list[_Place]) -> None:
        cache = self._kv.cache
        node = path[-1] if path else cache.root(cache_namespace(seq.request))
        node.users += 1
        held = []
        for group in self._groups:
            for one in path[len(places) - self.num_seen(group, len(places)) :]:
                if one.blocks[group] != NO_BLOCK:
                    cache.hold(group, one.blocks[group])
                    held.append((group, one.blocks[group]))
        self._sources.pop(seq.request_id, None)  # it is tried once
        for place in places:
            if place.takes_spare:
                place.spare = cache.take(MAIN)
            for group in place.blocks:
                assert place.address is not None, "a block is loaded from nowhere"
                place.blocks[group] = cache.take(group)
                place.read[group] = self._io.read(place.address, group, place.blocks[group])
        self._loads[seq.sequence_id] = _Load(path, node, held, places, self._clock())

    def _insert(self, load: _Load) -> None:
        """Enter what was read into the tree, up to the first block of the main group that was not; let go of all."""
        cache = self._kv.cache
        node, ended = load.node, False
        held = load.held
        for depth, place in enumerate(load.places):
            good = {group for group, read in place.read.items() if self._is_good(place, group, read)}
            ended = ended or (MAIN in place.blocks and MAIN not in good)
            if place.spare != NO_BLOCK:
                cache.drop(MAIN, place.spare)
            if depth >= len(load.path) and not ended:
                assert place.address is not None
                node = cache.child(node, array(INT32, place.address.key))
            at = load.path[depth] if depth < len(load.path) else node
            for group, block in place.blocks.items():
                if ended or group not in good:
                    cache.drop(group, block)
                    continue
                held.append((group, self._enter(at, group, block)))
                self.stats.loaded += 1
                source = None if place.address is None else place.address.source
                self.stats.pulled += source is not None
                self.stats.pulled_nixl += source is not None and source.memory is not None
            if not ended and at.stored is None and place.stored is not None and place.stored.state is State.STORED:
                at.stored = place.stored
        self.computed(node)  # what came from a peer is kept in the own file, too
        for group, block in reversed(held):
            cache.drop(group, block)
        cache.leave(node)

    def _enter(self, node: Node, group: int, block: int) -> int:
        """The group's block of a node, held: this one, unless it was computed meanwhile."""
        cache = self._kv.cache
        known = cache.insert(group, node, block)
        if known != block:
            cache.hold(group, known)
            cache.drop(group, block)
        return known

    def _is_good(self, place: _Place, group: int, read: "Future[bool]") -> bool:
        """Whether a block was read; else it is no longer where it was."""
        if read.exception() is None and read.result():
            return True
        self.stats.missed += 1
        if place.stored is not None:
            if group == MAIN:
                self.tree.remove(place.stored)
            place.stored.groups &= ~(1 << group)
        return False

    def wait(self, seconds: float) -> None:
        """Wait for the oldest load, if there is one; for an engine that has nothing else to do."""
        load = next(iter(self._loads.values()), None)
        if load is not None:
            wait(load.read, seconds)

    # ── other engines ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_writing(self) -> bool:
        return self._writer.is_writing or bool(self._exports)

    def export(self, request_id: str, namespace: str, tokens: "array[int]") -> None:
        """Tell by `drain_exports` where the blocks of this text are, once they are written."""
        size = self._kv.block_size
        node: StoredBlock | None = self.tree.find_root(namespace)
        path: list[StoredBlock] = []
        data, step = tokens.tobytes(), size * tokens.itemsize
        for start in range(0, len(data) - step + 1, step):
            node = None if node is None else node.children.get(data[start : start + step])
            if node is None:
                break
            path.append(node)
        self.tree.touch(path)
        self._exports.append((request_id, path, self._clock()))

    def drain_exports(self) -> Iterator[tuple[str, BlockSource]]:
        """The texts whose blocks are written, or have taken too long, once each."""
        while self._exports:
            request_id, path, began = self._exports[0]
            is_late = self._clock() - began > LOAD_SECONDS
            if not is_late and any(one.state is State.WRITING for one in path):
                break
            self._exports.popleft()
            there = list(takewhile(lambda one: one.state is State.STORED, path))
            yield request_id, self._io.source(tuple((one.slot, one.groups) for one in there))

    def close(self) -> None:
        """Write what is still to be written, and close the file. Nothing may be asked afterwards."""
        self.poll()
        self._writer.finish()
        self._io.close()

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────

    def held_blocks(self, group: int) -> Iterable[int]:
        """A group's blocks that loads hold, each as often as it is held."""
        for load in self._loads.values():
            yield from (block for one, block in load.held if one == group)
            yield from (place.blocks[group] for place in load.places if group in place.blocks)
            if group == MAIN:
                yield from (place.spare for place in load.places if place.spare != NO_BLOCK)

    def check_integrity(self) -> None:
        """Each block that is being written is in the pool's tree and the file's; the file's tree is sound."""
        self.tree.check_integrity()
        writing = self._writer.check_integrity(self._kv.cache)
        for stored in self.tree.blocks():
            assert (stored.state is State.WRITING) == (id(stored) in writing), "a block waits for no write"
        for node in self._kv.cache.nodes():
            if node.stored is not None and node.stored.state is not State.GONE:
                assert node.stored.key == node.key, "a block of the tree is stored as another"


def _addresses(
    source: BlockSource, namespace: str, tokens: "array[int]", block_size: int, begin: int
) -> Iterator[tuple[BlockAddress, int]]:
    """The text's blocks in a peer's file, from block `begin` on, each with the cache groups that it is there of."""
    digest = root_digest(namespace)
    for place, (slot, groups) in zip(range(len(tokens) // block_size), source.slots, strict=False):
        key = tokens[place * block_size : (place + 1) * block_size].tobytes()
        digest = path_digest(digest, key)
        if place >= begin:
            yield BlockAddress(slot, digest, key, source), groups
