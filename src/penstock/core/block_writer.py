"""Writes the prefix tree's blocks to the tier's file; defines the interface of the I/O threads.

computed ──write──> checksums of its groups ──commit──> its record: the block is stored
             └── evicted meanwhile, or an error ──> its slot in the file is freed
"""

from collections import deque
from concurrent.futures import Future, wait
from typing import Protocol

from penstock.api.request import BlockSource
from penstock.core.prefix_cache import NO_BLOCK, Node, PrefixCache
from penstock.core.stored_blocks import Record, State, StoredBlock, StoredTree
from penstock.dataclass import dataclass

MAIN = 0


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Location and expected content of a block."""

    slot: int
    digest: bytes
    key: bytes
    source: BlockSource | None = None
    """The peer's file; None: the own file."""


class BlockIO(Protocol):
    """Moves blocks between the pool and files in its own threads."""

    def source(self, slots: tuple[tuple[int, int], ...]) -> BlockSource:
        """The address of these slots for other engines; each pair is a slot and a bit set of its cache groups."""
        ...

    def write(self, slot: int, group: int, block: int) -> "Future[int]":
        """Write a block of a group's pool to its part of a slot; returns the checksum of the written bytes.

        Writes are executed in the order of calls.
        """

    def commit(self, record: Record, checksums: list[int]) -> "Future[None]":
        """Write a slot's record after all writes queued before it; `checksums` has one per group, or 0."""

    def read(self, address: BlockAddress, group: int, block: int) -> "Future[bool]":
        """Fill a block of a group's pool; returns whether its content is as expected."""

    def close(self) -> None:
        """Finish pending operations and close the file."""


@dataclass(slots=True)
class TierStats:
    """Block counters since the start, and current gauges."""

    num_slots: int = 0
    stored: int = 0
    """Gauge: slots in use."""
    written: int = 0
    unwritten: int = 0
    """Not written because writing failed, or evicted before."""
    loaded: int = 0
    pulled: int = 0
    """Loaded from other engines."""
    pulled_nixl: int = 0
    """Of these, by NIXL."""
    missed: int = 0
    """Expected but not loaded: damaged, overwritten, unreadable or on a peer that is gone."""
    late: int = 0
    """Sequences that continued without a load."""


@dataclass(slots=True, eq=False)
class _Write:
    stored: StoredBlock
    blocks: dict[int, int]
    """By cache group."""
    checksums: "dict[int, Future[int]]"
    """By cache group, without the blocks that were evicted meanwhile."""


class BlockWriter:
    """The writes in progress; `computed` and `forgotten` are called by the prefix cache."""

    def __init__(self, tree: StoredTree, io: BlockIO, stats: TierStats, num_groups: int) -> None:
        self._tree, self._io, self._stats = tree, io, stats
        self._num_groups = num_groups
        self._writes: dict[StoredBlock, _Write] = {}  # in the order of writing
        self._written_from: dict[tuple[int, int], _Write] = {}  # by group and block
        self._commits: deque[tuple[StoredBlock, Future[None]]] = deque()

    @property
    def is_writing(self) -> bool:
        return bool(self._writes or self._commits)

    def computed(self, node: Node) -> None:
        """Write a block that was inserted into the tree, and those before it that are no longer in the file."""
        if not self._tree.num_slots:
            return
        chain: list[Node] = []
        ancestor = node
        while ancestor.parent is not None and (ancestor.stored is None or ancestor.stored.state is State.GONE):
            chain.append(ancestor)
            ancestor = ancestor.parent
        if not chain:
            return
        stored = self._tree.root(node.namespace) if ancestor.parent is None else ancestor.stored
        for ancestor in reversed(chain):
            assert stored is not None
            # Another sequence, or an earlier engine, may have stored the same text.
            below = stored.children.get(ancestor.key) or self._write(stored, ancestor)
            if below is None:
                self._stats.unwritten += 1
                return
            ancestor.stored = stored = below

    def _write(self, parent: StoredBlock, node: Node) -> StoredBlock | None:
        stored = self._tree.insert(parent, node.key)
        if stored is not None:
            blocks = {group: block for group, block in enumerate(node.blocks) if block != NO_BLOCK}
            for pair in blocks.items():
                if pair in self._written_from:  # to a slot that was freed with its parent's
                    self._drop_write(self._written_from[pair])
            checksums = {group: self._io.write(stored.slot, group, block) for group, block in blocks.items()}
            write = self._writes[stored] = _Write(stored, blocks, checksums)
            self._written_from |= dict.fromkeys(blocks.items(), write)
        return stored

    def forgotten(self, group: int, block: int) -> None:
        """Stop writing a block that left the tree, as it will be overwritten."""
        write = self._written_from.pop((group, block), None)
        if write is not None:
            write.checksums.pop(group).cancel()
            if group == MAIN:
                self._drop_write(write)
                self._give_up(write.stored)

    def _drop_write(self, write: _Write) -> None:
        del self._writes[write.stored]
        for pair in write.blocks.items():
            if self._written_from.get(pair) is write:
                del self._written_from[pair]

    def _give_up(self, stored: StoredBlock) -> None:
        self._tree.remove(stored)  # may already be removed, with one before it
        self._stats.unwritten += 1

    def poll(self) -> None:
        """Process what the threads have finished. Called between steps."""
        while self._writes:
            # In the order of writing: a record is committed only after those of the blocks before it.
            write = next(iter(self._writes.values()))
            if not all(checksum.done() for checksum in write.checksums.values()):
                break
            self._drop_write(write)
            if write.stored.state is State.GONE or any(checksum.exception() for checksum in write.checksums.values()):
                self._give_up(write.stored)
            else:
                self._commit(write)
        while self._commits and self._commits[0][1].done():
            stored, commit = self._commits.popleft()
            if stored.state is State.GONE or commit.exception() is not None:
                self._give_up(stored)
            else:
                self._tree.written(stored)
                self._stats.written += 1

    def _commit(self, write: _Write) -> None:
        checksums = [0] * self._num_groups
        for group, checksum in write.checksums.items():
            checksums[group] = checksum.result()
            write.stored.groups |= 1 << group
        self._commits.append((write.stored, self._io.commit(write.stored.record, checksums)))

    def finish(self) -> None:
        """Wait for all writes, then for their records."""
        wait([checksum for write in self._writes.values() for checksum in write.checksums.values()])
        self.poll()
        wait([commit for _, commit in self._commits])

    def check_integrity(self, cache: PrefixCache) -> set[int]:
        """Assert that each block being written is in the pool's tree. Returns the ids of their file entries."""
        writing = {id(write.stored) for write in self._writes.values()} | {id(stored) for stored, _ in self._commits}
        for write in self._writes.values():
            for group in write.checksums:
                there = cache.contains(group, write.blocks[group])
                assert there, "a block is written that may have changed"
            assert write.stored.state is not State.STORED, "a block is stored before it is written"
        return writing
