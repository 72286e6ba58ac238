"""The prefix cache: a radix tree whose edges are the tokens of one block each.

    root("") ──[5 9 2 7]── blocks 12, 3 ──[1 1 4 8]── blocks 3, 7
        │                     └───────────[6 0 0 2]── blocks 40, none
        └──────[8 8 1 3]── blocks 7, none                  (block size 4, two cache groups)

A node stands for one block's tokens after the path to it, so equal paths are equal contents. Keys are the tokens
themselves (int32, as bytes), never a hash of them. An edge is one block long, so there is nothing to split, and each
operation costs time proportional to the blocks it touches.

For each cache group (`CacheGroup`) a node has a computed block of that group's pool, or none: a group with a window
needs no blocks behind it, and gives them up one by one. A path is a hit as far as every group can go on from its end.
Of a group without a window whoever holds a node's block holds its ancestors' too. Hence the idle nodes (held by nobody)
form subtrees, and because a sequence gives its blocks up deepest first, the least recently used idle block is always
that of a leaf. A node without any block is forgotten, unless it has children or a sequence will insert below it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from penstock.core.block_pool import BlockPool

NO_BLOCK = -1


class Node:
    """A computed block of tokens in the tree; a root has no blocks and no parent."""

    __slots__ = ("blocks", "children", "key", "namespace", "parent", "users")

    def __init__(self, parent: "Node | None", key: bytes, namespace: str, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.namespace = namespace
        self.blocks = [NO_BLOCK] * num_groups
        self.children: dict[bytes, Node] = {}
        self.users = 0  # sequences that will insert below it


class PrefixCache:
    """The tree, and for each cache group the order in which its idle blocks are evicted."""

    def __init__(self, pools: Sequence[BlockPool], block_size: int) -> None:
        self._pools = pools
        self._block_size = block_size
        self._roots: dict[str, Node] = {}
        self._node_of: list[dict[int, Node]] = [{} for _ in pools]
        self._idle: list[OrderedDict[int, Node]] = [OrderedDict() for _ in pools]

    def __len__(self) -> int:
        """Blocks of the first group."""
        return len(self._node_of[0])

    def contains(self, group: int, block: int) -> bool:
        """Whether the block is in the tree."""
        return block in self._node_of[group]

    def root(self, namespace: str) -> Node:
        """The namespace's root, made where there is none: it goes unless it gets users or children."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", namespace, len(self._pools))
        return root

    def leave(self, node: Node) -> None:
        """A sequence will not insert below this node any more."""
        node.users -= 1
        self._prune(node)

    def match(self, namespace: str, tokens: "array[int]", max_blocks: int) -> list[Node]:
        """The longest known path along the tokens' full blocks, root excluded, at most `max_blocks` long."""
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

    def child(self, parent: Node, tokens: "array[int]") -> Node:
        """The node of these tokens (one block's) below `parent`, made where there is none; one user goes from
        `parent` to it.
        """
        key = tokens.tobytes()
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, parent.namespace, len(self._pools))
        node.users += 1
        parent.users -= 1
        return node

    def insert(self, group: int, node: Node, block: int) -> int:
        """The group's block of a node: the one that is there, or else this one from now on."""
        known = node.blocks[group]
        if known != NO_BLOCK:
            return known
        assert block not in self._node_of[group], f"block {block} is in the tree already"
        node.blocks[group] = block
        self._node_of[group][block] = node
        return block

    def set_idle(self, group: int, block: int) -> None:
        """Nobody holds the block any more: it is the most recently used one to evict."""
        self._idle[group][block] = self._node_of[group][block]

    def set_held(self, group: int, block: int) -> None:
        """The block is idle no longer."""
        del self._idle[group][block]

    def evict(self, group: int) -> int | None:
        """Take the group's least recently used idle block out of the tree; None if nothing is idle."""
        if not self._idle[group]:
            return None
        block, node = self._idle[group].popitem(last=False)
        node.blocks[group] = NO_BLOCK
        del self._node_of[group][block]
        self._prune(node)
        return block

    def _prune(self, node: Node) -> None:
        """Forget a node that has neither blocks nor users nor children, then its parent likewise."""
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

    def check_integrity(self, windows: Sequence[int | None]) -> None:
        """The tree's links are sound, its indices are those of its nodes, and idle blocks are those that nobody holds.

        `windows` are those of the groups: without one, no block outlives its parent's.
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
        """Of a group without a window the ancestors of a block are there, held as it is, and evicted after it."""
        order = {block: i for i, block in enumerate(self._idle[group])}
        for block, node in self._node_of[group].items():
            assert node.parent is not None
            if node.parent.parent is None:
                continue
            parent = node.parent.blocks[group]
            assert parent != NO_BLOCK, f"block {block} outlives its parent"
            assert order.get(parent, len(order)) > order.get(block, -1), f"block {block} is evicted after its parent"
            assert parent not in order or block in order, f"block {block} is held, its parent is not"
