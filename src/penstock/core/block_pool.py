"""The pool of KV blocks: who holds how many, and which are free.

A block is in one of three states, told by its reference count:

    FREE (-1)  on the free list
    idle  (0)  in the prefix cache, held by no sequence: can be reused or evicted
    held (>0)  by that many sequences

Taking, sharing and freeing are constant-time; a block freed twice, or used while free, fails at once.
"""

from collections.abc import Iterable

FREE = -1


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks."""

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
