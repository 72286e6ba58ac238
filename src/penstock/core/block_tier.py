"""The tier below the prefix cache: KV blocks in a file, and in the files of other engines.

    prefix tree ──computed──> write ──> the file                     a step's new blocks; threads write, steps go on
                <──inserted── load  <── the file, or a peer's        before a waiting sequence is admitted

A block in the tree never changes, so it is written from its place in memory; if it is evicted meanwhile, the write is
discarded. Blocks are written as soon as they are computed, so evicting one costs nothing and the end of a process loses
nothing. A record is written only after its block: either a slot holds what its record says, or the checksum fails.

A sequence at the head of the queue whose text continues in a file beyond the tree waits for a load: blocks are
allocated from the pool, filled by threads and inserted like computed ones. Unreadable blocks are recomputed. Nothing
here blocks: `poll`, called between steps, collects what the threads have finished.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import takewhile

from penstock.api.request import BlockSource
from penstock.core.block_writer import MAIN, BlockAddress, BlockIO, BlockWriter, TierStats
from penstock.core.kv_manager import KVManager
from penstock.core.prefix_cache import NO_BLOCK, Node, cache_namespace
from penstock.core.sequence import Sequence
from penstock.core.stored_blocks import State, StoredBlock, StoredTree, path_digest, root_digest
from penstock.dataclass import dataclass

LOAD_SECONDS = 10.0
"""Time after which a sequence continues without its load."""


@dataclass(slots=True, eq=False)
class _BlockLoad:
    """One block of a text: its location in files, and the pool blocks being filled with it."""

    address: BlockAddress | None
    stored: StoredBlock | None
    """The block in the engine's own file, if it is there."""
    blocks: dict[int, int]
    """Pool blocks to fill, by cache group."""
    read: "dict[int, Future[bool]]"
    spare: int = NO_BLOCK
    """A main-group block that is held during the load if only other groups' blocks are filled."""

    @property
    def takes_spare(self) -> bool:
        """Whether to hold a main-group block, so that a load, like a sequence, has one wherever it has another group's.

        Hence a group with as many blocks as the main group never runs out (`memory.layer_groups`).
        """
        return bool(self.blocks) and MAIN not in self.blocks


@dataclass(slots=True, eq=False)
class _Load:
    """A load: blocks of a tree path, which are held, and the blocks to load that it lacks or that extend it."""

    path: list[Node]
    node: Node
    """End of the path, or the root."""
    held: list[tuple[int, int]]
    """(Cache group, block) pairs of the tree, shallow ones first."""
    parts: list[_BlockLoad]
    """The text's blocks, from the first on."""
    began: float

    @property
    def read(self) -> "list[Future[bool]]":
        return [read for part in self.parts for read in part.read.values()]

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.read)


class BlockTier:
    """Loads blocks for waiting sequences; its `BlockWriter` writes computed ones."""

    def __init__(
        self, kv: KVManager, tree: StoredTree, io: BlockIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stats = TierStats(tree.num_slots)
        self.tree = tree
        self._kv, self._io, self._clock = kv, io, clock
        self._writer = BlockWriter(tree, io, self.stats, len(kv.pools))
        self._loads: dict[int, _Load] = {}  # by waiting sequence
        self._sources: dict[str, BlockSource] = {}
        self._exports: deque[tuple[str, list[StoredBlock], float]] = deque()
        self._late: set[int] = set()  # sequences that continue without their load
        self._groups = range(len(kv.pools))
        kv.cache.listener = self

    def computed(self, node: Node) -> None:
        """See `Listener`."""
        self._writer.computed(node)

    def forgotten(self, group: int, block: int) -> None:
        """See `Listener`."""
        self._writer.forgotten(group, block)

    def poll(self) -> None:
        """Process what the threads have finished. Called between steps."""
        self._writer.poll()
        for sequence_id, load in list(self._loads.items()):
            if load.is_done:
                del self._loads[sequence_id]
                self._late.discard(sequence_id)
                self._insert(load)
        self.stats.stored = len(self.tree)

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, request_id: str, source: BlockSource) -> None:
        """Register the source of a prompt that another engine has computed."""
        self._sources[request_id] = source

    def ended(self, request_id: str) -> None:
        """Forget the request's source."""
        self._sources.pop(request_id, None)

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def ready(self, seq: Sequence, reserve: int) -> bool:
        """Whether a waiting sequence may be admitted: False while it waits for a load, which this may start.

        `reserve` blocks must also stay available; without them the sequence cannot be admitted anyway.
        """
        load = self._loads.get(seq.sequence_id)
        if load is not None:
            return self._is_late(seq.sequence_id, load)
        path = self._kv.known_path(seq)
        self.tree.touch(node.stored for node in path if node.stored is not None)
        # A disk that was too slow for one load gets no other until that one is done.
        parts = self._find(seq, path) if not self._late else []
        if not parts or not self._has_room(seq, path[: len(parts)], parts, reserve):
            return True
        self._begin(seq, path[: len(parts)], parts)
        return False

    def _has_room(self, seq: Sequence, path: list[Node], parts: list[_BlockLoad], reserve: int) -> bool:
        """Whether the pools have the blocks for the load, and the sequence could be admitted after it."""
        known = [node for node in path if node.blocks[MAIN] != NO_BLOCK]
        spares = sum(part.takes_spare for part in parts)
        if self._kv.num_needed(seq, known) + spares + reserve > self._kv.num_available:
            return False
        for group in self._groups[1:]:  # running sequences cannot need a quarter of the pool (`memory.layer_groups`)
            most, total = self._kv.pools[group].num_blocks, self._kv.pool.num_blocks
            taken = sum(1 for _ in self.held_blocks(group)) + self.num_seen(group, len(parts))
            if most < total and taken > total // 4:
                return False
        return True

    def num_seen(self, group: int, depth: int) -> int:
        """Number of a group's blocks needed to continue after the first `depth` blocks of a text."""
        return depth - self._kv.first_seen(group, depth * self._kv.block_size)

    def _is_late(self, sequence_id: int, load: _Load) -> bool:
        if self._clock() - load.began <= LOAD_SECONDS:
            return False
        if sequence_id not in self._late:
            self._late.add(sequence_id)
            self.stats.late += 1
        return True

    def _find(self, seq: Sequence, path: list[Node]) -> list[_BlockLoad]:
        """The blocks of the sequence's text up to where it could continue after a load, including those to load.

        Empty if the tree alone reaches as far.
        """
        namespace, most = cache_namespace(seq.request), seq.num_reusable
        stored = self.tree.match(namespace, self._kv.keys(seq, most))
        self.tree.touch(stored)
        candidates = [(BlockAddress(block.slot, block.digest, block.key), block, block.groups) for block in stored]
        parts = [_BlockLoad(address, block, {}, {}) for address, block, _ in candidates]
        groups = [groups for _, _, groups in candidates]
        source = self._sources.get(seq.request_id)
        if source is not None:
            for address, bits in _addresses(source, namespace, self._kv.keys(seq, most), len(parts)):
                parts.append(_BlockLoad(address, None, {}, {}))
                groups.append(bits)
        for _ in range(len(parts), len(path)):
            parts.append(_BlockLoad(None, None, {}, {}))
            groups.append(0)
        known = [[block != NO_BLOCK for block in node.blocks] for node in path]
        known += [[False] * len(self._groups) for _ in range(len(path), len(parts))]
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
                    parts[depth].blocks[group] = NO_BLOCK
        return parts[:usable]

    def _begin(self, seq: Sequence, path: list[Node], parts: list[_BlockLoad]) -> None:
        cache = self._kv.cache
        node = path[-1] if path else cache.root(cache_namespace(seq.request))
        # The node must not be pruned during the load, which inserts below it.
        node.users += 1
        held = []
        for group in self._groups:
            for block in path[len(parts) - self.num_seen(group, len(parts)) :]:
                if block.blocks[group] != NO_BLOCK:
                    cache.hold(group, block.blocks[group])
                    held.append((group, block.blocks[group]))
        self._sources.pop(seq.request_id, None)  # tried only once
        for part in parts:
            if part.takes_spare:
                part.spare = cache.take(MAIN)
            for group in part.blocks:
                assert part.address is not None, "a block is loaded from nowhere"
                part.blocks[group] = cache.take(group)
                part.read[group] = self._io.read(part.address, group, part.blocks[group])
        self._loads[seq.sequence_id] = _Load(path, node, held, parts, self._clock())

    def _insert(self, load: _Load) -> None:
        """Insert the loaded blocks into the tree, up to the first main-group block that failed; release all others."""
        cache = self._kv.cache
        node, ended = load.node, False
        held = load.held
        for depth, part in enumerate(load.parts):
            good = {group for group, read in part.read.items() if self._is_good(part, group, read)}
            ended = ended or (MAIN in part.blocks and MAIN not in good)
            if part.spare != NO_BLOCK:
                cache.drop(MAIN, part.spare)
            if depth >= len(load.path) and not ended:
                assert part.address is not None
                node = cache.child(node, part.address.key)
            at = load.path[depth] if depth < len(load.path) else node
            for group, block in part.blocks.items():
                if ended or group not in good:
                    cache.drop(group, block)
                    continue
                held.append((group, self._enter(at, group, block)))
                self.stats.loaded += 1
                source = None if part.address is None else part.address.source
                self.stats.pulled += source is not None
                self.stats.pulled_nixl += source is not None and source.memory is not None
            if not ended and at.stored is None and part.stored is not None and part.stored.state is State.STORED:
                at.stored = part.stored
        self.computed(node)  # blocks from a peer are also written to the own file
        # Deepest first, as everywhere: the least recently used idle block is always a leaf.
        for group, block in reversed(held):
            cache.drop(group, block)
        cache.leave(node)

    def _enter(self, node: Node, group: int, block: int) -> int:
        """The group's block of a node, held: this block, unless the node got one meanwhile."""
        cache = self._kv.cache
        known = cache.insert(group, node, block)
        if known != block:
            cache.hold(group, known)
            cache.drop(group, block)
        return known

    def _is_good(self, part: _BlockLoad, group: int, read: "Future[bool]") -> bool:
        """Whether a block was read; a block that was not is removed from the file's index."""
        if read.exception() is None and read.result():
            return True
        self.stats.missed += 1
        if part.stored is not None:
            if group == MAIN:
                self.tree.remove(part.stored)
            part.stored.groups &= ~(1 << group)
        return False

    def wait(self, seconds: float) -> None:
        """Wait for the oldest load, if any; for an engine without other work."""
        load = next(iter(self._loads.values()), None)
        if load is not None:
            wait(load.read, seconds)

    # ── other engines ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_writing(self) -> bool:
        return self._writer.is_writing or bool(self._exports)

    def export(self, request_id: str, namespace: str, keys: Iterable[bytes]) -> None:
        """Have `drain_exports` return the location of these blocks once they are written; their request leaves."""
        self.ended(request_id)
        node: StoredBlock | None = self.tree.find_root(namespace)
        path: list[StoredBlock] = []
        for key in keys:
            node = None if node is None else node.children.get(key)
            if node is None:
                break
            path.append(node)
        self.tree.touch(path)
        self._exports.append((request_id, path, self._clock()))

    def drain_exports(self) -> Iterator[tuple[str, BlockSource]]:
        """Texts whose blocks are written, or have taken too long, each once."""
        while self._exports:
            request_id, path, began = self._exports[0]
            is_late = self._clock() - began > LOAD_SECONDS
            if not is_late and any(block.state is State.WRITING for block in path):
                break
            self._exports.popleft()
            there = list(takewhile(lambda block: block.state is State.STORED, path))
            yield request_id, self._io.source(tuple((block.slot, block.groups) for block in there))

    def close(self) -> None:
        """Finish all writes and close the file. No calls may follow."""
        self.poll()
        self._writer.finish()
        self._io.close()

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────

    def held_blocks(self, group: int) -> Iterable[int]:
        """A group's blocks held by loads, once per reference."""
        for load in self._loads.values():
            yield from (block for held_group, block in load.held if held_group == group)
            yield from (part.blocks[group] for part in load.parts if group in part.blocks)
            if group == MAIN:
                yield from (part.spare for part in load.parts if part.spare != NO_BLOCK)

    def check_integrity(self) -> None:
        """Assert that blocks being written are in the pool's and the file's trees, and that the latter is sound."""
        self.tree.check_integrity()
        writing = self._writer.check_integrity(self._kv.cache)
        for stored in self.tree.blocks():
            assert (stored.state is State.WRITING) == (id(stored) in writing), "a block waits for no write"
        for node in self._kv.cache.nodes():
            if node.stored is not None and node.stored.state is not State.GONE:
                assert node.stored.key == node.key, "a block of the tree is stored as another"


def _addresses(
    source: BlockSource, namespace: str, keys: Iterable[bytes], begin: int
) -> Iterator[tuple[BlockAddress, int]]:
    """The text's blocks in a peer's file from block `begin` on, each with a bit set of its cache groups."""
    digest = root_digest(namespace)
    for index, (key, (slot, groups)) in enumerate(zip(keys, source.slots, strict=False)):
        digest = path_digest(digest, key)
        if index >= begin:
            yield BlockAddress(slot, digest, key, source), groups
