"""Which blocks a sequence has: hits from the prefix cache, new ones from the pool, and their return.

With its blocks a sequence has a sequence slot, where the runner keeps its block table (`core.plan`). The table's
beginning that the runner has already, `num_sent_blocks`, ends before the first block that changes.

Shortage is `None` or `False`, never an exception: the scheduler decides what to do about it. Idle blocks of the prefix
cache count as available and are evicted, least recently used first, as new ones are needed.
"""

from array import array
from collections import Counter
from collections.abc import Iterable

from penstock.core.prefix_cache import BlockPool, Node, PrefixCache
from penstock.core.sequence import INT32, NO_SLOT, Sequence


class KVManager:
    """The block tables of all sequences over one pool, and their slots."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size)
        self.caching = enable_prefix_caching
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and idle ones."""
        return self.pool.num_free + self.pool.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, seq: Sequence, reserve: int) -> int | None:
        """Give the sequence blocks for all its tokens, beginning with those that the cache has.

        Sets `num_computed` to the tokens found. At least the last token is always left to compute, since its logits
        are needed. `reserve` blocks must stay available besides.

        Returns None once it is done; on a shortage of blocks, or of slots, how many blocks must be available, without
        the reserve.
        """
        assert not seq.block_table, f"{seq} has blocks already"
        total, path = self.blocks_for(len(seq.tokens)), self._match(seq)
        hits_idle = sum(self.pool.refs(node.block) == 0 for node in path)
        needed = total - len(path) + hits_idle
        if needed + reserve > self.num_available or not self._free_slots:
            return needed
        seq.take_slot(self._free_slots.pop())
        for node in path:
            self._hold(node.block)
            seq.block_table.append(node.block)
        for _ in range(total - len(path)):
            seq.block_table.append(self._take())
        if self.caching:
            root = self.cache.enter(seq.request.namespace)
            seq.node = path[-1] if path else root
        seq.num_committed = len(path)
        seq.num_computed = len(path) * self.block_size
        self.queried_tokens += len(seq.tokens)
        self.hit_tokens += seq.num_computed
        return None

    def missing(self, seq: Sequence, reserve: int, releasing: Iterable[Sequence]) -> int:
        """How many blocks would be missing for `admit` after these sequences were released; 0 if it would succeed."""
        holders = Counter(block for one in releasing for block in one.block_table)
        released = {block for block, count in holders.items() if count == self.pool.refs(block)}
        path = self._match(seq)
        hits_idle = sum(self.pool.refs(node.block) == 0 or node.block in released for node in path)
        needed = self.blocks_for(len(seq.tokens)) - len(path) + hits_idle
        return max(0, needed + reserve - self.num_available - len(released))

    def _match(self, seq: Sequence) -> list[Node]:
        """What the prefix cache has of the sequence's tokens."""
        if not self.caching:
            return []
        return self.cache.match(seq.request.namespace, seq.tokens, seq.num_reusable // self.block_size)

    def make_room(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Make the slot of the sequence's next token writable: a new block, or its own copy of a shared one.

        A copy that the runner must make is added to `copies`. False if there is no block for it.
        """
        if seq.num_computed == len(seq.block_table) * self.block_size:
            if not self.num_available:
                return False
            seq.block_table.append(self._take())
        elif seq.shares_tail:
            shared = seq.block_table[-1]
            if self.pool.refs(shared) > 1:
                if not self.num_available:
                    return False
                seq.block_table[-1] = self._take()
                seq.num_sent_blocks = min(seq.num_sent_blocks, len(seq.block_table) - 1)
                copies.append((shared, seq.block_table[-1]))
                self._drop(shared)
            seq.shares_tail = False
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Add blocks for `num_tokens` more tokens than are computed, while there are any.

        Returns how many of them there is room for. The last block must be the sequence's own: see `make_room`.
        """
        wanted = self.blocks_for(seq.num_computed + num_tokens)
        while len(seq.block_table) < wanted and self.num_available:
            seq.block_table.append(self._take())
        return min(num_tokens, len(seq.block_table) * self.block_size - seq.num_computed)

    def shrink(self, seq: Sequence) -> None:
        """Give back the blocks behind those that hold what is computed."""
        while len(seq.block_table) > self.blocks_for(seq.num_computed):
            self._drop(seq.block_table.pop())
        seq.num_sent_blocks = min(seq.num_sent_blocks, len(seq.block_table))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child share all of the parent's blocks; the partly filled last one is copied on the first write."""
        for block in parent.block_table:
            self.pool.hold(block)
        assert self._free_slots, "the scheduler runs more sequences than there are slots"
        child.take_slot(self._free_slots.pop())
        child.block_table = parent.block_table[:]
        child.num_computed = parent.num_computed
        child.num_committed = parent.num_committed
        child.node = parent.node
        if self.caching:
            self.cache.enter(child.request.namespace)
        if parent.num_computed % self.block_size:
            parent.shares_tail = child.shares_tail = True

    def hand_over(self, seq: Sequence, heir: Sequence) -> None:
        """Give all of a sequence's blocks, and its slot, to another of the same prompt."""
        heir.take_slot(seq.slot)
        seq.slot, seq.sampled = NO_SLOT, None
        heir.block_table, seq.block_table = seq.block_table, array(INT32)
        heir.num_computed, heir.num_committed, heir.node = seq.num_computed, seq.num_committed, seq.node
        heir.num_cached_tokens = seq.num_cached_tokens
        heir.num_prompt_logprobs = seq.num_prompt_logprobs
        seq.num_computed, seq.num_committed, seq.node = 0, 0, None

    def commit(self, seq: Sequence) -> None:
        """Enter the blocks that are full and computed into the prefix tree.

        Where an equal block is there already the sequence goes on with that one and gives its own back, so that
        whoever holds a block holds its ancestors in the tree.
        """
        if not self.caching:
            return
        size = self.block_size
        for i in range(seq.num_committed, seq.num_computed // size):
            assert seq.node is not None
            block = seq.block_table[i]
            node = self.cache.insert(seq.node, seq.tokens[i * size : (i + 1) * size], block)
            if node.block != block:
                self._hold(node.block)
                seq.block_table[i] = node.block
                seq.num_sent_blocks = min(seq.num_sent_blocks, i)
                self._drop(block)
            seq.node = node
            seq.num_committed = i + 1

    def release(self, seq: Sequence) -> None:
        """Take back a sequence's slot and its blocks, deepest first; those in the prefix tree become idle there."""
        if seq.slot != NO_SLOT:
            self._free_slots.append(seq.slot)
            seq.slot, seq.sampled = NO_SLOT, None
        for block in reversed(seq.block_table):
            self._drop(block)
        if seq.node is not None:
            self.cache.leave(seq.request.namespace)
        seq.block_table = array(INT32)
        seq.num_computed = seq.num_committed = 0
        seq.node = None
        seq.shares_tail = False

    def _take(self) -> int:
        block = self.pool.take()
        if block is None:
            evicted = self.cache.evict()
            assert evicted is not None, "a block was taken without looking whether one is available"
            self.pool.free(evicted)
            block = self.pool.take()
            assert block is not None
        return block

    def _hold(self, block: int) -> None:
        if self.pool.hold(block):
            self.cache.set_held(block)

    def _drop(self, block: int) -> None:
        if self.pool.drop(block):
            if block in self.cache:
                self.cache.set_idle(block)
            else:
                self.pool.free(block)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Blocks and slots are conserved; the tree is sound; each sequence's table covers what it has computed."""
        held: list[int] = []
        slots = self._free_slots[:]
        for seq in sequences:
            held.extend(seq.block_table)
            assert len(seq.block_table) * self.block_size >= seq.num_computed, f"{seq} computed past its blocks"
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq} has a block twice"
            assert (seq.slot != NO_SLOT) == bool(seq.block_table), f"{seq} has a slot or blocks, not both"
            if seq.sampled is not None:
                assert (seq.sampled.slot, seq.sampled.tokens) == (seq.slot, seq.tokens), f"{seq} is sampled as another"
                assert seq.sampled.tokens is seq.tokens, f"{seq} is sampled after tokens that it had"
                slots.append(seq.slot)
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost, or assigned twice"
        self.pool.check_integrity(held, self.cache.blocks())
        self.cache.check_integrity()
