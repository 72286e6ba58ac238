"""The prefix cache: a radix tree whose edges are the tokens of one block each.

    root("") ──[5 9 2 7]── block 12 ──[1 1 4 8]── block 3
        │                     └───────[6 0 0 2]── block 40
        └──────[8 8 1 3]── block 7                              (block size 4)

A node is one computed block; the path to it is the tokens whose keys and values it holds, so equal paths are equal
contents. Keys are the tokens themselves (int32, as bytes), never a hash of them. An edge is one block long, so there
is nothing to split, and each operation costs time proportional to the blocks it touches.

Whoever holds a node's block holds its ancestors' too. Hence the idle nodes (held by nobody) form subtrees, and because
a sequence gives its blocks up deepest first, the least recently used idle node is always a leaf: eviction is one pop.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from penstock.core.block_pool import BlockPool


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
        """Nobody holds the block any more: it is the most recently used one to evict."""
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
