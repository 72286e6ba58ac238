"""Index of the blocks in a file and their slots: a tree like the prefix cache's, with its own eviction order.

    root of a namespace ──[5 9 2 7]── slot 12 ──[1 1 4 8]── slot 3
                            └─────────[6 0 0 2]── slot 40               (block size 4)

A block is identified by its path: the keys of the text's blocks (`block_keys`). A lookup walks the tree and compares
keys. In the file, where each record must be self-contained, a path is identified by a digest of the parent's digest
and the block's own key, starting from a digest of the namespace: BLAKE2b of 256 bits, which no two paths share.

Leaves are evicted least recently used first, so a block's parent is in the file as long as the block is.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from enum import Enum, auto

from penstock.dataclass import dataclass

DIGEST_BYTES = 32


def root_digest(namespace: str) -> bytes:
    """Digest of the empty path in a namespace."""
    return hashlib.blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"penstock-kv").digest()


def path_digest(parent: bytes, key: bytes) -> bytes:
    """Digest of the parent's path extended by a block."""
    return hashlib.blake2b(parent + key, digest_size=DIGEST_BYTES).digest()


class State(Enum):
    """Progress of a block's write; `GONE` is final."""

    WRITING = auto()
    STORED = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Record:
    """The file's record of a slot's block."""

    slot: int
    digest: bytes
    parent: bytes
    depth: int
    """Number of blocks before it in its path."""
    key: bytes
    """See `block_keys`."""
    tick: int
    """Larger for blocks written later."""
    groups: int = 1
    """Bit set of the cache groups whose block is in the slot."""


class StoredBlock:
    """A block in the file; a root has no slot."""

    __slots__ = ("children", "depth", "digest", "groups", "key", "parent", "slot", "state", "used")

    def __init__(self, parent: "StoredBlock | None", key: bytes, digest: bytes, slot: int, state: State) -> None:
        self.parent = parent
        self.key = key
        self.digest = digest
        self.depth: int = -1 if parent is None else parent.depth + 1
        self.slot = slot
        self.state = state
        self.groups = 0  # bit set of the cache groups whose block is in the slot
        self.used = 0
        self.children: dict[bytes, StoredBlock] = {}

    @property
    def record(self) -> Record:
        """Its record in the file."""
        assert self.parent is not None, "a root is not in the file"
        return Record(self.slot, self.digest, self.parent.digest, self.depth, self.key, self.used, self.groups)


class StoredTree:
    """The file's slots, and the tree of the blocks in them."""

    def __init__(self, num_slots: int, found: Iterable[Record] = ()) -> None:
        """
        Args:
            found: records read from an existing file. Inconsistent ones are dropped.
        """
        self.num_slots = num_slots
        self._roots: dict[bytes, StoredBlock] = {}
        self._leaves: list[tuple[int, int, StoredBlock]] = []  # a heap; entries may be stale
        self._num_pushed = 0
        self._tick = 0
        self._num_blocks = 0
        taken = self._take_up(found)
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]

    def __len__(self) -> int:
        return self._num_blocks

    def _take_up(self, found: Iterable[Record]) -> set[int]:
        """Build the tree from records, parents first; returns the slots in use."""
        known: dict[bytes, StoredBlock] = {}
        # Parents first. Of two records of one block the older is taken, and the slot of the other is free.
        for record in sorted(found, key=lambda record: (record.depth, record.tick)):
            parent = known.get(record.parent)
            if record.depth == 0:
                parent = self._roots.get(record.parent) or self._new_root(record.parent)
            fits = parent is not None and parent.depth + 1 == record.depth and record.digest not in known
            if parent is None or not fits or path_digest(record.parent, record.key) != record.digest:
                continue
            block = StoredBlock(parent, record.key, record.digest, record.slot, State.STORED)
            block.used, block.groups = record.tick, record.groups
            known[record.digest] = parent.children[record.key] = block
            self._tick = max(self._tick, record.tick)
        for root in list(self._roots.values()):
            self._prune(root)
        for block in known.values():
            self._offer(block)
        self._num_blocks = len(known)
        return {block.slot for block in known.values()}

    def _new_root(self, digest: bytes) -> StoredBlock:
        root = self._roots[digest] = StoredBlock(None, b"", digest, -1, State.STORED)
        return root

    def root(self, namespace: str) -> StoredBlock:
        """The namespace's root, which is removed with its last block."""
        digest = root_digest(namespace)
        return self._roots.get(digest) or self._new_root(digest)

    def find_root(self, namespace: str) -> StoredBlock | None:
        """The namespace's root, if it has blocks."""
        return self._roots.get(root_digest(namespace))

    def match(self, namespace: str, keys: Iterable[bytes]) -> list[StoredBlock]:
        """The longest path along these keys in the file, root excluded."""
        node = self.find_root(namespace)
        path: list[StoredBlock] = []
        if node is None:
            return path
        for key in keys:
            node = node.children.get(key)
            if node is None or node.state is not State.STORED:
                break
            path.append(node)
        return path

    def touch(self, path: Iterable[StoredBlock]) -> None:
        """Mark these blocks as used now."""
        self._tick += 1
        for block in path:
            block.used = self._tick

    def insert(self, parent: StoredBlock, key: bytes) -> StoredBlock | None:
        """Allocate a slot for a new block to be written; None if all slots are being written."""
        assert parent.state is not State.GONE, "a block is put below one that is gone"
        assert key not in parent.children, "a block is there already"
        digest = path_digest(parent.digest, key)
        block = StoredBlock(parent, key, digest, -1, State.WRITING)
        parent.children[key] = block  # before the eviction, which must not take its parent
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            del parent.children[key]
            self._offer(parent)
            self._prune(parent)
            return None
        block.slot = slot
        self._num_blocks += 1
        self.touch([block])
        return block

    def written(self, block: StoredBlock) -> None:
        """Mark a block as written."""
        assert block.state is State.WRITING, "a block is written twice"
        block.state = State.STORED
        self._offer(block)

    def remove(self, block: StoredBlock) -> None:
        """Remove a block and all below it."""
        assert block.parent is not None, "a root is not removed"
        if block.state is State.GONE:
            return
        parent = block.parent
        del parent.children[block.key]
        stack = [block]
        while stack:
            removed = stack.pop()
            stack.extend(removed.children.values())
            removed.children = {}
            removed.state = State.GONE
            self._free.append(removed.slot)
            self._num_blocks -= 1
        self._offer(parent)
        self._prune(parent)

    def _offer(self, block: StoredBlock) -> None:
        """Make a block evictable, if nothing depends on it."""
        if block.parent is not None and block.state is State.STORED and not block.children:
            heapq.heappush(self._leaves, (block.used, self._num_pushed, block))
            self._num_pushed += 1

    def _evict(self) -> int | None:
        """Evict the least recently used leaf; returns its slot."""
        while self._leaves:
            used, _, block = heapq.heappop(self._leaves)
            if block.state is State.GONE or block.children:
                continue  # becomes evictable again without its last child
            if used != block.used:
                self._offer(block)
                continue
            self.remove(block)
            return self._free.pop()
        return None

    def _prune(self, block: StoredBlock) -> None:
        if block.parent is None and not block.children and self._roots.get(block.digest) is block:
            del self._roots[block.digest]

    def blocks(self) -> Iterator[StoredBlock]:
        """All blocks of the file, parents before children."""
        stack = list(self._roots.values())
        while stack:
            block = stack.pop()
            stack.extend(block.children.values())
            if block.parent is not None:
                yield block

    def check_integrity(self) -> None:
        """Assert that each slot is free or used by one block, parents exist, and evictable blocks are queued."""
        blocks = list(self.blocks())
        slots = [block.slot for block in blocks] + self._free
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or used twice"
        assert len(blocks) == self._num_blocks, "the count of blocks is off"
        offered = {id(block) for _, _, block in self._leaves}
        for block in blocks:
            assert block.parent is not None
            assert block.parent.children.get(block.key) is block, "a block has a wrong parent"
            assert block.state is not State.GONE, "a block in the tree is gone"
            assert block.parent.state is not State.GONE, "a block outlives its parent"
            assert block.digest == path_digest(block.parent.digest, block.key), "a block has a wrong digest"
            assert block.depth == block.parent.depth + 1, "a block has a wrong depth"
            if block.state is State.STORED and not block.children:
                assert id(block) in offered, "a leaf is never evicted"
        assert all(root.children for root in self._roots.values()), "a root is left for nothing"
