"""The pool of KV blocks, and the prefix cache: a radix tree whose edges are the tokens of one block each.

    root("") ──[5 9 2 7]── blocks 12, 3 ──[1 1 4 8]── blocks 3, 7
        │                     └───────────[6 0 0 2]── blocks 40, none
        └──────[8 8 1 3]── blocks 7, none                  (block size 4, two cache groups)

A node represents one block's tokens after the path to it, so equal paths have equal contents. Keys are the tokens
themselves (int32, as bytes), never a hash of them; images in a block are compared by digest (`block_keys`). Since an
edge is one block long, nothing is ever split, and each operation takes time proportional to the blocks it touches.

For each cache group (`CacheGroup`) a node has a computed block of that group's pool, or none: a group with a window
does not need the blocks behind it, and releases them one by one; in a group of states only some nodes have a block. A
path is a hit as far as every group can continue from its end.
In a group without a window, a sequence that holds a node's block also holds its ancestors' blocks. Hence the idle nodes
form subtrees, and since a sequence releases its blocks deepest first, the least recently used idle block always
belongs to a leaf. A node without blocks is removed, unless it has children or a sequence will insert below it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.core.stored_blocks import StoredBlock

from penstock.api.request import Request

FREE = -1


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks. A block is in one of three states:

        FREE (-1)  on the free list
        idle  (0)  in the prefix cache, held by no sequence: can be reused or evicted
        held (>0)  by that many sequences

    Taking, sharing and freeing are constant-time; a block freed twice, or used while free, fails at once.
    """

    __slots__ = ("_free", "_refs", "num_blocks", "num_idle")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool needs a block"
        self.num_blocks = num_blocks
        self.num_idle = 0
        self._refs = [FREE] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_idle - len(self._free)

    def refs(self, block: int) -> int:
        """Number of sequences that hold the block; 0 if idle, `FREE` if free."""
        return self._refs[block]

    def take(self) -> int | None:
        """Take a free block, with one reference; None if none is free."""
        if not self._free:
            return None
        block = self._free.pop()
        assert self._refs[block] == FREE, f"block {block} is on the free list and in use"
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> bool:
        """Add a reference to a used block. Returns True if it was idle."""
        count = self._refs[block]
        assert count != FREE, f"block {block} is free and cannot be held"
        self._refs[block] = count + 1
        if count == 0:
            self.num_idle -= 1
        return count == 0

    def drop(self, block: int) -> bool:
        """Remove a reference. Returns True if it was the last: the block is now idle."""
        count = self._refs[block]
        assert count > 0, f"block {block} is not held and cannot be dropped"
        self._refs[block] = count - 1
        if count == 1:
            self.num_idle += 1
        return count == 1

    def free(self, block: int) -> None:
        """Return an idle block to the free list."""
        assert self._refs[block] == 0, f"block {block} has {self._refs[block]} references and cannot be freed"
        self._refs[block] = FREE
        self.num_idle -= 1
        self._free.append(block)

    def check_integrity(self, held: Iterable[int], cached: Iterable[int]) -> None:
        """Every block is free, idle in the cache or held, and each count is that of the blocks themselves.

        `held` lists each sequence's blocks (a shared one once a holder), `cached` the prefix cache's.
        """
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        cached = set(cached)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        for block, count in enumerate(counts):
            if block in free:
                assert self._refs[block] == FREE, f"block {block} is free, but counted {self._refs[block]}"
                assert count == 0, f"block {block} is free and held"
                assert block not in cached, f"block {block} is free and cached"
            else:
                assert self._refs[block] == count, f"block {block}: counted {self._refs[block]}, held by {count}"
                assert count or block in cached, f"block {block} leaked"
        assert self.num_idle == sum(ref == 0 for ref in self._refs), "the count of idle blocks is off"
        assert self.num_free + self.num_idle + self.num_held == self.num_blocks


NO_BLOCK = -1


def cache_namespace(request: Request) -> str:
    """Cache namespace of a request: separate for private tenants and for each adapter."""
    return request.namespace if request.adapter is None else f"{request.namespace}\0{request.adapter.digest}"


class Node:
    """A computed block of tokens in the tree; a root has no blocks and no parent."""

    __slots__ = ("blocks", "children", "key", "namespace", "parent", "stored", "users")

    def __init__(self, parent: "Node | None", key: bytes, namespace: str, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.namespace = namespace
        self.blocks = [NO_BLOCK] * num_groups
        self.children: dict[bytes, Node] = {}
        self.users = 0  # sequences that will insert below it
        self.stored: StoredBlock | None = None  # its place in the lower tier


class Listener(Protocol):
    """Copies the tree's blocks elsewhere (`core.block_tier`)."""

    def computed(self, node: Node) -> None:
        """Called when the node has its blocks; they do not change while they are in the tree."""

    def forgotten(self, group: int, block: int) -> None:
        """Called when a block has left the tree."""

    def held_blocks(self, group: int) -> Iterable[int]:
        """A group's blocks that it holds, once per reference."""

    def check_integrity(self) -> None: ...


class PrefixCache:
    """The tree, and the eviction order of the idle blocks of each cache group."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self.listener: Listener | None = None
        self._pools = pools
        self._roots: dict[str, Node] = {}
        self._node_of: list[dict[int, Node]] = [{} for _ in pools]
        self._idle: list[OrderedDict[int, Node]] = [OrderedDict() for _ in pools]

    def __len__(self) -> int:
        """Blocks of the main group's pool."""
        return len(self._node_of[0])

    def contains(self, group: int, block: int) -> bool:
        """Whether the block is in the tree."""
        return block in self._node_of[group]

    def root(self, namespace: str) -> Node:
        """The namespace's root, created if necessary; it is removed unless it gets users or children."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", namespace, len(self._pools))
        return root

    def leave(self, node: Node) -> None:
        """Record that a sequence will no longer insert below this node."""
        node.users -= 1
        self._prune(node)

    def match(self, namespace: str, keys: Iterable[bytes]) -> list[Node]:
        """The longest path along these keys in the tree, root excluded."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return path
        # Keys are made one by one, so a miss near the beginning of a long prompt costs nothing for its rest.
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def child(self, parent: Node, key: bytes) -> Node:
        """The node of one block below `parent`, created if necessary; moves one user from `parent` to it."""
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, parent.namespace, len(self._pools))
        node.users += 1
        parent.users -= 1
        return node

    def insert(self, group: int, node: Node, block: int) -> int:
        """Set the group's block of a node, unless it already has one; returns the node's block."""
        known = node.blocks[group]
        if known != NO_BLOCK:
            return known
        assert block not in self._node_of[group], f"block {block} is in the tree already"
        node.blocks[group] = block
        self._node_of[group][block] = node
        return block

    def set_idle(self, group: int, block: int) -> None:
        """Mark a block without references as the most recently used candidate for eviction."""
        self._idle[group][block] = self._node_of[group][block]

    def set_held(self, group: int, block: int) -> None:
        """Mark a block as no longer idle."""
        del self._idle[group][block]

    def evict(self, group: int) -> int | None:
        """Remove the group's least recently used idle block from the tree; None if none is idle."""
        block = next(iter(self._idle[group]), None)
        if block is not None:
            self.forget(group, block)
        return block

    def forget(self, group: int, block: int) -> None:
        """Remove a block from the tree; its holders keep it."""
        node = self._node_of[group].pop(block)
        self._idle[group].pop(block, None)
        node.blocks[group] = NO_BLOCK
        if self.listener is not None:
            self.listener.forgotten(group, block)
        self._prune(node)

    def take(self, group: int) -> int:
        """Allocate a block with one reference, free or by eviction; the caller knows that one is available."""
        pool = self._pools[group]
        block = pool.take()
        if block is None:
            evicted = self.evict(group)
            assert evicted is not None, "a block was taken without looking whether one is available"
            pool.free(evicted)
            block = pool.take()
            assert block is not None
        return block

    def hold(self, group: int, block: int) -> None:
        """Add a reference to a used block."""
        if self._pools[group].hold(block):
            self.set_held(group, block)

    def drop(self, group: int, block: int) -> None:
        """Remove a reference. After the last one the block is idle if it is in the tree, else free."""
        pool = self._pools[group]
        if pool.drop(block):
            if self.contains(group, block):
                self.set_idle(group, block)
            else:
                pool.free(block)

    def discard(self, group: int, block: int) -> None:
        """Free a block of the tree that will not be used again, unless a sequence holds it."""
        pool = self._pools[group]
        if pool.refs(block) == 0:
            self.forget(group, block)
            pool.free(block)

    def _prune(self, node: Node) -> None:
        """Remove a node without blocks, users and children, then its parent in the same way."""
        while not (node.users or node.children or any(block != NO_BLOCK for block in node.blocks)):
            if node.parent is None:
                if self._roots.get(node.namespace) is node:
                    del self._roots[node.namespace]
                return
            del node.parent.children[node.key]
            node = node.parent

    def blocks(self, group: int) -> Iterator[int]:
        """The group's blocks in the tree."""
        return iter(self._node_of[group])

    def nodes(self) -> Iterator[Node]:
        """The nodes that have a block of the main group."""
        return iter(self._node_of[0].values())

    def check_integrity(self, windows: Sequence[int | None]) -> None:
        """Assert that the tree's links and indices are consistent, and that only blocks without a holder are idle.

        `windows` are those of the groups (see `KVManager`): in a group without one, no block outlives its parent's.
        """
        seen: list[dict[int, Node]] = [{} for _ in self._pools]
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert node.users >= 0, "a node has fewer users than none"
            assert node.users or node.children or max(node.blocks) != NO_BLOCK, "a node is left for nothing"
            for key, child in node.children.items():
                assert child.parent is node, "a node has a wrong parent"
                assert child.key == key, "a node has a wrong key"
                assert child.namespace == node.namespace, "a node is in two namespaces"
                stack.append(child)
                for group, block in enumerate(child.blocks):
                    if block != NO_BLOCK:
                        seen[group][block] = child
        assert seen == self._node_of, "the index and the tree differ"
        for group, pool in enumerate(self._pools):
            idle = [block for block in seen[group] if pool.refs(block) == 0]
            assert set(self._idle[group]) == set(idle), "the idle list and the counts differ"
            if windows[group] is None:
                self._check_ancestors(group)

    def _check_ancestors(self, group: int) -> None:
        """Assert for a group without a window that a block's ancestors exist, are held like it and evicted after it."""
        order = {block: i for i, block in enumerate(self._idle[group])}
        for block, node in self._node_of[group].items():
            assert node.parent is not None
            if node.parent.parent is None:
                continue
            parent = node.parent.blocks[group]
            assert parent != NO_BLOCK, f"block {block} outlives its parent"
            assert order.get(parent, len(order)) > order.get(block, -1), f"block {block} is evicted after its parent"
            assert parent not in order or block in order, f"block {block} is held, its parent is not"
