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
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

from penstock.core.kv_manager import KVManager
from penstock.core.prefix_cache import Node
from penstock.core.sequence import INT32, Sequence
from penstock.core.stored_blocks import Record, State, StoredBlock, StoredTree, path_digest, root_digest
from penstock.request import BlockSource

LOAD_SECONDS = 10.0
"""After which a sequence goes on without what it waits for."""
MAIN = 0


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Where a block is, and what it must be."""

    slot: int
    digest: bytes
    key: bytes
    source: BlockSource | None = None
    """The peer's file; None: the engine's own."""


class BlockIO(Protocol):
    """Moves blocks between the pool and files, in threads of its own."""

    def source(self, slots: tuple[int, ...]) -> BlockSource:
        """Where other engines find what is in these slots."""
        ...

    def write(self, slot: int, block: int) -> "Future[int]":
        """Write a block of the pool; the checksum of what was written. One after another, in the order of calls."""

    def commit(self, record: Record, checksum: int) -> "Future[None]":
        """Write what a slot holds, after all that was to be written before."""

    def read(self, address: BlockAddress, block: int) -> "Future[bool]":
        """Fill a block of the pool; whether it is now what it must be."""

    def close(self) -> None:
        """Finish what is under way, and close the file."""


@dataclass(slots=True)
class TierStats:
    """Counters since the start, in blocks, and gauges of this moment."""

    num_slots: int = 0
    stored: int = 0
    """Gauge: slots in use."""
    written: int = 0
    unwritten: int = 0
    """Not written, as the file could not be, or evicted before."""
    loaded: int = 0
    pulled: int = 0
    """Loaded from other engines."""
    missed: int = 0
    """Not loaded though they were to be there: damaged, overwritten, unreadable or of a peer that is gone."""
    late: int = 0
    """Sequences that went on without a load."""


@dataclass(slots=True, eq=False)
class _Write:
    stored: StoredBlock
    block: int
    checksum: "Future[int]"


@dataclass(slots=True, eq=False)
class _Load:
    """A path of the tree that is held, and the blocks that will go on from it."""

    path: list[Node]
    node: Node
    """The path's end, or the root."""
    addresses: list[BlockAddress]
    stored: list[StoredBlock | None]
    """Of each address, what it is in the engine's own file."""
    blocks: list[int]
    read: "list[Future[bool]]"
    began: float

    @property
    def is_done(self) -> bool:
        return all(one.done() for one in self.read)


class BlockTier:
    """What is written and loaded; it listens to the prefix cache, and the scheduler asks it before it admits."""

    def __init__(
        self, kv: KVManager, tree: StoredTree, io: BlockIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stats = TierStats(tree.num_slots)
        self.tree = tree
        self._kv, self._io, self._clock = kv, io, clock
        self._writes: dict[int, _Write] = {}  # by block, in the order of writing
        self._commits: deque[tuple[StoredBlock, Future[None]]] = deque()
        self._loads: dict[int, _Load] = {}  # by the sequence that waits
        self._sources: dict[str, BlockSource] = {}
        self._exports: deque[tuple[str, list[StoredBlock], float]] = deque()
        self._late: set[int] = set()  # sequences that were told to go on without their load
        assert len(kv.pools) == 1, "blocks of several cache groups are not stored"
        kv.cache.listener = self

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def computed(self, node: Node) -> None:
        """A block is in the tree now: write it, and those before it that the file has given up, if it has not."""
        if not self.tree.num_slots:
            return
        chain: list[Node] = []
        one = node
        while one.parent is not None and (one.stored is None or one.stored.state is State.GONE):
            chain.append(one)
            one = one.parent
        if not chain:
            return
        stored = self.tree.root(node.namespace) if one.parent is None else one.stored
        for one in reversed(chain):
            assert stored is not None
            below = stored.children.get(one.key) or self._write(stored, one)
            if below is None:
                self.stats.unwritten += 1
                return
            one.stored = stored = below

    def _write(self, parent: StoredBlock, node: Node) -> StoredBlock | None:
        stored = self.tree.insert(parent, node.key)
        if stored is not None:
            block = node.blocks[MAIN]
            self._writes.pop(block, None)  # of one whose place in the file went with its parent's
            self._writes[block] = _Write(stored, block, self._io.write(stored.slot, block))
        return stored

    def forgotten(self, block: int) -> None:
        """A block left the tree, and will be overwritten."""
        write = self._writes.pop(block, None)
        if write is not None:
            write.checksum.cancel()
            self._give_up(write.stored)

    def _give_up(self, stored: StoredBlock) -> None:
        self.tree.remove(stored)  # which may have happened with one before it
        self.stats.unwritten += 1

    def poll(self) -> None:
        """Take note of what the threads have done. Between steps."""
        while self._writes:
            write = next(iter(self._writes.values()))
            if not write.checksum.done():
                break
            del self._writes[write.block]
            if write.stored.state is State.GONE or write.checksum.exception() is not None:
                self._give_up(write.stored)
            else:
                self._commits.append((write.stored, self._io.commit(write.stored.record, write.checksum.result())))
        while self._commits and self._commits[0][1].done():
            stored, commit = self._commits.popleft()
            if stored.state is State.GONE or commit.exception() is not None:
                self._give_up(stored)
            else:
                self.tree.written(stored)
                self.stats.written += 1
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
        found = self._find(seq, len(path)) if not self._late else []
        if not found or self._kv.num_needed(seq, path) + reserve > self._kv.num_available:
            return True
        self._begin(seq, path, found)
        return False

    def _is_late(self, sequence_id: int, load: _Load) -> bool:
        if self._clock() - load.began <= LOAD_SECONDS:
            return False
        if sequence_id not in self._late:
            self._late.add(sequence_id)
            self.stats.late += 1
        return True

    def _find(self, seq: Sequence, num_known: int) -> list[tuple[BlockAddress, StoredBlock | None]]:
        """Where the blocks that the sequence could use lie, from the first on that the tree has not."""
        size, namespace = self._kv.block_size, seq.request.namespace
        most = seq.num_reusable // size
        path = self.tree.match(namespace, seq.tokens, size, most)
        self.tree.touch(path)
        found: list[tuple[BlockAddress, StoredBlock | None]] = [
            (BlockAddress(one.slot, one.digest, one.key), one) for one in path[num_known:]
        ]
        source = self._sources.get(seq.request_id)
        if source is not None:
            begin = num_known + len(found)
            found += [
                (address, None) for address in _addresses(source, namespace, seq.tokens[: most * size], size, begin)
            ]
        return found

    def _begin(self, seq: Sequence, path: list[Node], found: list[tuple[BlockAddress, StoredBlock | None]]) -> None:
        cache = self._kv.cache
        node = path[-1] if path else cache.root(seq.request.namespace)
        node.users += 1
        for one in path:
            cache.hold(MAIN, one.blocks[MAIN])
        self._sources.pop(seq.request_id, None)  # it is tried once
        blocks = [cache.take(MAIN) for _ in found]
        addresses = [address for address, _ in found]
        read = [self._io.read(address, block) for address, block in zip(addresses, blocks, strict=True)]
        self._loads[seq.sequence_id] = _Load(
            path, node, addresses, [stored for _, stored in found], blocks, read, self._clock()
        )

    def _insert(self, load: _Load) -> None:
        """Enter what was read into the tree, up to the first block that was not, and let go of everything."""
        cache = self._kv.cache
        node = load.node
        held: list[int] = []
        reads = zip(load.addresses, load.stored, load.blocks, load.read, strict=True)
        for address, stored, block, read in reads:
            if read.exception() is not None or not read.result():
                self._missed(stored)
                break
            node = cache.child(node, array(INT32, address.key))
            known = cache.insert(MAIN, node, block)
            if known != block:  # computed meanwhile
                cache.hold(MAIN, known)
                cache.drop(MAIN, block)
            held.append(known)
            if stored is not None and stored.state is State.STORED:
                node.stored = stored
            self.stats.loaded += 1
            self.stats.pulled += address.source is not None
        for block in load.blocks[len(held) :]:
            cache.drop(MAIN, block)
        if held:
            self.computed(node)  # what came from a peer is kept in the own file, too
        for block in [*reversed(held), *(one.blocks[MAIN] for one in reversed(load.path))]:
            cache.drop(MAIN, block)
        cache.leave(node)

    def _missed(self, stored: StoredBlock | None) -> None:
        self.stats.missed += 1
        if stored is not None:
            self.tree.remove(stored)

    def wait(self, seconds: float) -> None:
        """Wait for a load to get on, if there is one; for an engine that has nothing else to do."""
        reads = [read for load in self._loads.values() for read in load.read if not read.done()]
        if reads:
            wait(reads, seconds, FIRST_COMPLETED)

    # ── other engines ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_writing(self) -> bool:
        return bool(self._writes or self._commits or self._exports)

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
            slots = []
            for one in path:
                if one.state is not State.STORED:
                    break
                slots.append(one.slot)
            yield request_id, self._io.source(tuple(slots))

    def close(self) -> None:
        """Write what is still to be written, and close the file. Nothing may be asked afterwards."""
        wait([write.checksum for write in self._writes.values()])
        self.poll()
        wait([commit for _, commit in self._commits])
        self._io.close()

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────

    def held_blocks(self) -> Iterable[int]:
        """The pool's blocks that loads hold, each as often as it is held."""
        for load in self._loads.values():
            yield from load.blocks
            yield from (node.blocks[MAIN] for node in load.path)

    def check_integrity(self) -> None:
        """Each block that is being written is in the pool's tree and the file's; the file's tree is sound."""
        self.tree.check_integrity()
        writing = {id(write.stored) for write in self._writes.values()} | {id(stored) for stored, _ in self._commits}
        for write in self._writes.values():
            assert self._kv.cache.contains(MAIN, write.block), "a block is written that may have changed"
            assert write.stored.state is not State.STORED, "a block is stored before it is written"
        for stored in self.tree.blocks():
            assert (stored.state is State.WRITING) == (id(stored) in writing), "a block waits for no write"
        for node in self._kv.cache.nodes():
            if node.stored is not None and node.stored.state is not State.GONE:
                assert node.stored.key == node.key, "a block of the tree is stored as another"


def _addresses(
    source: BlockSource, namespace: str, tokens: "array[int]", block_size: int, begin: int
) -> Iterator[BlockAddress]:
    """The text's blocks in a peer's file, from block `begin` on."""
    digest = root_digest(namespace)
    for place, slot in zip(range(len(tokens) // block_size), source.slots, strict=False):
        key = tokens[place * block_size : (place + 1) * block_size].tobytes()
        digest = path_digest(digest, key)
        if place >= begin:
            yield BlockAddress(slot, digest, key, source)
