"""The pool of KV blocks, and the prefix cache: a radix tree whose edges are the tokens of one block each.

    root("") ──[5 9 2 7]── block 12 ──[1 1 4 8]── block 3
        │                     └───────[6 0 0 2]── block 40
        └──────[8 8 1 3]── block 7                              (block size 4)

A node is one computed block; the path to it is the tokens whose keys and values it holds, so equal paths are equal
contents. Keys are the tokens themselves (int32, as bytes), never a hash of them. An edge is one block long, so there
is nothing to split, and each operation costs time proportional to the blocks it touches.

A sequence that holds a node's block holds its ancestors' too. Hence the idle nodes (held by none) form subtrees, and
because a sequence gives its blocks up deepest first, the least recently used idle node is always a leaf: eviction is
one pop.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator

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
        """How many sequences hold the block; 0 for an idle one, `FREE` for a free one."""
        return self._refs[block]

    def take(self) -> int | None:
        """A free block, now held once; None if there is none."""
        if not self._free:
            return None
        block = self._free.pop()
        assert self._refs[block] == FREE, f"block {block} is on the free list and in use"
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> bool:
        """Hold a used block once more. True if it was idle before."""
        count = self._refs[block]
        assert count != FREE, f"block {block} is free and cannot be held"
        self._refs[block] = count + 1
        if count == 0:
            self.num_idle -= 1
        return count == 0

    def drop(self, block: int) -> bool:
        """Give up one hold. True if it was the last: the block is idle now."""
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


class Node:
    """A computed block in the tree; a root has no block and no parent."""

    __slots__ = ("block", "children", "key", "namespace", "parent", "users")

    def __init__(self, parent: "Node | None", key: bytes, block: int, namespace: str) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}
        self.users = 0  # of a root: the sequences that may still insert below it


class PrefixCache:
    """The tree and the order in which its idle blocks are evicted."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[str, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._idle: OrderedDict[int, Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._node_of)

    def __contains__(self, block: int) -> bool:
        return block in self._node_of

    def enter(self, namespace: str) -> Node:
        """The namespace's root, kept until as many `leave` have followed."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", -1, namespace)
        root.users += 1
        return root

    def leave(self, namespace: str) -> None:
        root = self._roots[namespace]
        root.users -= 1
        self._prune(root)

    def match(self, namespace: str, tokens: "array[int]", max_blocks: int) -> list[Node]:
        """The longest cached path along the tokens' full blocks, root excluded, at most `max_blocks` long."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return path
        size = self._block_size * tokens.itemsize
        data = tokens.tobytes()
        for start in range(0, max_blocks * size, size):
            node = node.children.get(data[start : start + size])
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, parent: Node, tokens: "array[int]", block: int) -> Node:
        """The node of these tokens (one block's) below `parent`: a new one for `block`, or the one that is there."""
        key = tokens.tobytes()
        node = parent.children.get(key)
        if node is None:
            assert block not in self._node_of, f"block {block} is in the tree already"
            node = Node(parent, key, block, parent.namespace)
            parent.children[key] = self._node_of[block] = node
        return node

    def set_idle(self, block: int) -> None:
        """No sequence holds the block any more: it becomes the most recently used candidate for eviction."""
        self._idle[block] = self._node_of[block]

    def set_held(self, block: int) -> None:
        del self._idle[block]

    def evict(self) -> int | None:
        """Take the least recently used idle leaf out of the tree and give its block; None if nothing is idle."""
        if not self._idle:
            return None
        block, node = self._idle.popitem(last=False)
        assert not node.children, f"block {block} was evicted before its descendants"
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._node_of[block]
        self._prune(node.parent)
        return block

    def _prune(self, node: Node) -> None:
        """Forget a root that has neither nodes nor users, so that namespaces cost nothing once they are gone."""
        if node.parent is None and not node.children and not node.users:
            del self._roots[node.namespace]

    def blocks(self) -> Iterator[int]:
        return iter(self._node_of)

    def check_integrity(self) -> None:
        """The tree, its index and the idle list agree; holds never skip an ancestor; leaves come before parents."""
        seen: dict[int, Node] = {}
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node, f"block {child.block} has a wrong parent"
                assert child.key == key, f"block {child.block} has a wrong key"
                assert child.namespace == node.namespace, f"block {child.block} is in two namespaces"
                parent_refs = self._pool.refs(node.block) if node.parent else 1
                assert parent_refs > 0 or self._pool.refs(child.block) == 0, f"block {child.block} outlives its parent"
                seen[child.block] = child
                stack.append(child)
        assert seen == self._node_of, "the index and the tree differ"
        assert set(self._idle) == {b for b in seen if self._pool.refs(b) == 0}, "the idle list and the counts differ"
        order = {block: i for i, block in enumerate(self._idle)}
        for block, position in order.items():
            parent = seen[block].parent
            assert parent is not None
            assert order.get(parent.block, len(order)) > position, f"block {block} would be evicted after its parent"
