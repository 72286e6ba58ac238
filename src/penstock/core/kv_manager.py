"""KV cache manager: the blocks of each sequence, as prefix cache hits and new blocks from the pools, and their release.

A model's layers are divided into cache groups (`CacheGroup`), each with its own pool. Index i of every group's block
table holds the tokens from `i * block_size` on.

    tokens         0 ... 31 | 32 ... 63 | 64 ... 95 | 96 ...            block_size 32
    main group          12         3          40         41             all tokens, or those of a window
    bounded group        -         -           7          9             a window: blocks behind it were freed
    bounded group        -         -           5          8             states: see `core.states`

The first group is the *main* one. A sequence gets main blocks for all its tokens on admission, so only this group can
run out of memory. The others are *bounded*: they have a window or hold states, a sequence gets their blocks as it is
computed, and the memory plan sizes their pools so that all sequences together never run out (`memory.layer_groups`).

With its blocks a sequence gets a sequence slot, where the runner keeps its block tables (`core.plan`). `num_sent` is
the length of the unchanged part of a table that the runner already has.

Shortage is `None` or `False`, never an exception: the scheduler decides what to do about it. Idle blocks of the prefix
cache count as available and are evicted, least recently used first, when new ones are needed.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from penstock.core.block_keys import block_key, block_keys
from penstock.core.plan import BlockCopy
from penstock.core.prefix_cache import NO_BLOCK, BlockPool, Node, PrefixCache, cache_namespace
from penstock.core.sequence import INT32, NO_SLOT, BlockTable, Sequence
from penstock.core.states import StateGroup, StateTable
from penstock.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that cache the same part of each sequence's context, in blocks of one pool."""

    num_blocks: int
    window: int | None = None
    """Number of keys a query sees, including its own; None: all."""
    checkpoint_every: int | None = None
    """For a group of states: interval, in blocks, of checkpoints for the prefix cache, besides those made anyway. None:
    the layers cache keys."""


class KVManager:
    """Block tables of all sequences over the pools of the cache groups, and sequence slots."""

    def __init__(
        self, groups: tuple[CacheGroup, ...], block_size: int, num_slots: int, *, enable_prefix_caching: bool = True
    ) -> None:
        """`groups`: the main group first."""
        self.block_size = block_size
        self.pools = [BlockPool(group.num_blocks) for group in groups]
        self.pool = self.pools[0]
        """The main group's pool."""
        self.cache = PrefixCache(self.pools)
        self.caching = enable_prefix_caching
        self.queried_tokens = 0
        self.hit_tokens = 0
        # Continuing from a border needs the state there: the block of the token before, as with a window of 2 keys.
        self._windows = [2 if group.checkpoint_every is not None else group.window for group in groups]
        self._windowed = [index for index, window in enumerate(self._windows) if window is not None]
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._states = {
            index: StateGroup(
                index,
                self.pools[index],
                self.cache,
                self._free_slots,
                block_size,
                group.checkpoint_every if enable_prefix_caching else None,
            )
            for index, group in enumerate(groups)
            if group.checkpoint_every is not None
        }
        assert 0 not in self._states, "the main group keeps keys"

    @property
    def num_available(self) -> int:
        """Main-group blocks that can be allocated now: free and idle ones."""
        return self.pool.num_free + self.pool.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_seen(self, group: int, position: int) -> int:
        """Index of the first block of a group that a query at `position`, or a later one, sees."""
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def admit(self, seq: Sequence, reserve: int) -> int | None:
        """Allocate blocks for all tokens of the sequence, starting with prefix cache hits.

        Sets `num_computed` to the tokens found. `reserve` blocks must also stay available.

        Returns None on success; on a shortage of blocks or slots, the number of blocks that must be available, without
        the reserve.
        """
        assert seq.slot == NO_SLOT, f"{seq} has blocks already"
        known = self.known_path(seq)
        path = known[: self._usable(known)]
        needed = self.num_needed(seq, path)  # of the main group alone: the plan gives the others enough for all slots
        if needed + reserve > self.num_available or not self._free_slots:
            return needed
        self._take_slot(seq)
        if self.caching:
            seq.node = path[-1] if path else self.cache.root(cache_namespace(seq.request))
            seq.node.users += 1  # keeps the node, below which the sequence will insert, though it may lose its blocks
        self._hold_hits(seq, path, len(known))  # before blocks are taken, which evicts idle ones
        main = seq.tables[0].blocks
        for _ in range(self.blocks_for(len(seq.tokens)) - len(main)):
            main.append(self.cache.take(0))
        seq.num_committed = len(path)
        seq.num_computed = len(path) * self.block_size
        self.queried_tokens += len(seq.tokens)
        self.hit_tokens += seq.num_computed
        return None

    def num_needed(self, seq: Sequence, path: list[Node]) -> int:
        """Main-group blocks that must be available to admit the sequence with these hits."""
        refs = self.pool.refs
        # An idle hit counts as available until the sequence holds it.
        hits_idle = sum(refs(node.blocks[0]) == 0 for node in path[self._first_hit(0, path) :])
        return self.blocks_for(len(seq.tokens)) - len(path) + hits_idle

    def _first_hit(self, group: int, path: list[Node]) -> int:
        """Index of the first node of a path whose block the group needs to continue from the path's end."""
        return self.first_seen(group, len(path) * self.block_size)

    def _take_slot(self, seq: Sequence) -> None:
        places = range(len(self.pools))
        tables = [(StateTable if group in self._states else BlockTable)(array(INT32)) for group in places]
        seq.take_slot(self._free_slots.pop(), tables)

    def _hold_hits(self, seq: Sequence, path: list[Node], num_known: int) -> None:
        for group, table in enumerate(seq.tables):
            if isinstance(table, StateTable):
                self._states[group].begin(table, path, num_known)
                continue
            table.first = self._first_hit(group, path)
            table.blocks.extend([0] * table.first)  # placeholders for blocks that are never read
            for node in path[table.first :]:
                self.cache.hold(group, node.blocks[group])
                table.blocks.append(node.blocks[group])

    def missing(self, seq: Sequence, reserve: int, releasing: Iterable[Sequence]) -> int:
        """Number of blocks missing for `admit` after these sequences were released; 0 if it would succeed."""
        holders = Counter(block for holder in releasing for block in holder.tables[0].held)
        # A shared block becomes available only if all of its holders release it.
        released = {block for block, count in holders.items() if count == self.pool.refs(block)}
        path = self._match(seq)
        hits_idle = sum(node.blocks[0] in released for node in path[self._first_hit(0, path) :])
        needed = self.num_needed(seq, path) + hits_idle
        return max(0, needed + reserve - self.num_available - len(released))

    def _match(self, seq: Sequence) -> list[Node]:
        """Prefix cache lookup: the longest path of the sequence's tokens from whose end every group can continue."""
        path = self.known_path(seq)
        return path[: self._usable(path)]

    def known_path(self, seq: Sequence) -> list[Node]:
        """The longest path in the prefix tree along the sequence's tokens."""
        if not self.caching:
            return []
        # Not the whole text: the last token is computed for its logits, and prompt tokens for log-probabilities.
        return self.cache.match(cache_namespace(seq.request), self.keys(seq, seq.num_reusable))

    def keys(self, seq: Sequence, num_tokens: int) -> Iterator[bytes]:
        """Keys of the full blocks among the sequence's first `num_tokens` tokens."""
        return block_keys(seq.tokens, seq.request.images, self.block_size, num_tokens // self.block_size)

    def _usable(self, path: list[Node]) -> int:
        """Length of the longest usable prefix of a path: every group has the blocks that a query after it sees."""
        if not self._windowed:
            return len(path)
        return self.usable([[block != NO_BLOCK for block in node.blocks] for node in path])

    def usable(self, path: list[list[bool]]) -> int:
        """Length of the longest prefix of a text's blocks after which every group has the blocks that a query sees.

        `path` contains, for each of the text's blocks, whether each group has it.
        """
        runs = [0] * len(self.pools)  # per group, the length of the run of blocks that ends here
        usable = 0
        for depth, has in enumerate(path, 1):
            runs = [run + 1 if there else 0 for run, there in zip(runs, has, strict=True)]
            position = depth * self.block_size
            if all(run >= depth - self.first_seen(group, position) for group, run in enumerate(runs)):
                usable = depth
        return usable

    def make_room(self, seq: Sequence, copies: list[BlockCopy]) -> bool:
        """Make the slot of the sequence's next token writable: allocate a new block, or copy a shared one.

        A copy that the runner must make is appended to `copies`. False if no block is available.
        """
        main = seq.tables[0]
        if seq.num_computed == len(main.blocks) * self.block_size:
            if not self.num_available:
                return False
            main.blocks.append(self.cache.take(0))
        elif seq.shares_tail:
            shared = self.pool.refs(main.blocks[-1]) > 1
            if shared and not self.num_available:
                return False
            for group in range(len(self.pools)):
                if group not in self._states:
                    self._copy_tail(seq, group, copies)
            seq.shares_tail = False
        return True

    def _copy_tail(self, seq: Sequence, group: int, copies: list[BlockCopy]) -> None:
        """Replace the last block of a table by a copy, if others hold it."""
        table = seq.tables[group]
        shared = table.blocks[-1]
        if self.pools[group].refs(shared) > 1:
            table.blocks[-1] = self.cache.take(group)
            table.keep_sent(len(table.blocks) - 1)
            copies.append(BlockCopy(group, shared, table.blocks[-1]))
            self.cache.drop(group, shared)

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Add blocks for `num_tokens` tokens after the computed ones, as far as available.

        Returns how many of these tokens have room. The last block must not be shared: see `make_room`.
        """
        num_blocks, main = self.blocks_for(seq.num_computed + num_tokens), seq.tables[0].blocks
        while len(main) < num_blocks and self.num_available:
            main.append(self.cache.take(0))
        return min(num_tokens, len(main) * self.block_size - seq.num_computed)

    def extend_bounded(self, sequences: Iterable[Sequence], query_lens: Iterable[int]) -> None:
        """Allocate the bounded groups' blocks for the tokens that a step computes."""
        if len(self.pools) == 1:
            return
        for seq, count in zip(sequences, query_lens, strict=True):
            end = seq.num_computed + count
            for group, table in enumerate(seq.tables[1:], 1):
                if isinstance(table, StateTable):
                    self._states[group].extend(seq, table, end - seq.num_drafts)
                    continue
                while len(table.blocks) < self.blocks_for(end):
                    table.blocks.append(self.cache.take(group))

    def begin_drafts(self, seq: Sequence, num_drafts: int) -> int:
        """Allocate room for drafts after the sequence's last token: blocks, and a branch of its states.

        Returns how many of `num_drafts` there is room for.
        """
        most = min([num_drafts, *(states.most_drafts(seq) for states in self._states.values())])
        lacking = len(seq.tokens) - seq.num_computed
        room = self.grow(seq, lacking + most) - lacking
        if room > 0:
            for group, states in self._states.items():
                table = seq.tables[group]
                assert isinstance(table, StateTable)
                states.begin_drafts(table)
        return room

    def end_drafts(self, seq: Sequence, num_accepted: int, num_drafts: int) -> None:
        """Keep the accepted drafts of a step, which alone are left of the sequence's tokens.

        Their keys stay, and so do states if all drafts were accepted. Otherwise a sequence with states returns to the
        token before its drafts; it keeps the blocks of the accepted drafts, and of the token after them.
        """
        end = len(seq.tokens)
        seq.num_returned = 0
        if not self._states:
            seq.num_computed = end
            self.shrink(seq)
        else:
            seq.num_computed = end - num_accepted
            self._commit_full(seq)
            self._end_branches(seq, end if num_accepted == num_drafts else None)
            if num_accepted == num_drafts:
                seq.num_computed = end
            else:
                seq.num_returned = num_accepted
            self._shrink(seq, max(seq.num_computed, end + 1 if num_accepted else 0))
        self._commit_full(seq)

    def _end_branches(self, seq: Sequence, num_tokens: int | None) -> None:
        """Make the branches the live states after `num_tokens` tokens; None: drop them."""
        for group, states in self._states.items():
            table = seq.tables[group]
            assert isinstance(table, StateTable)
            if num_tokens is None:
                states.drop_drafts(table)
            else:
                states.keep_drafts(seq, table, num_tokens)

    def _commit_full(self, seq: Sequence) -> None:
        if seq.num_computed >= (seq.num_committed + 1) * self.block_size:
            self.commit(seq)

    def shrink(self, seq: Sequence) -> None:
        """Release the blocks behind the computed tokens, which held drafts, of a sequence without states."""
        assert not self._states, "tokens are taken back of a sequence with states"
        self._shrink(seq, seq.num_computed)

    def _shrink(self, seq: Sequence, num_tokens: int) -> None:
        """Release the key blocks behind the first `num_tokens` tokens."""
        num_blocks = self.blocks_for(num_tokens)
        for group, table in enumerate(seq.tables):
            if group in self._states:
                continue
            while len(table.blocks) > num_blocks:
                self.cache.drop(group, table.blocks.pop())
            table.keep_sent(len(table.blocks))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child share all of the parent's blocks; the partly filled last one is copied on the first write.

        The child gets its own states, copied before the next step: see `drain_copies`.
        """
        assert self._free_slots, "the scheduler runs more sequences than there are slots"
        child.take_slot(self._free_slots.pop(), [])
        for group, table in enumerate(parent.tables):
            if isinstance(table, StateTable):
                child.tables.append(self._states[group].fork(parent, table))
                continue
            for block in table.held:
                self.pools[group].hold(block)
            child.tables.append(BlockTable(table.blocks[:], table.first))
        child.num_computed = parent.num_computed
        child.num_committed = parent.num_committed
        child.node = parent.node
        if child.node is not None:
            # Both will insert below the node: it stays until neither does.
            child.node.users += 1
        # A full last block is never written again, so it may stay shared.
        if parent.num_computed % self.block_size:
            parent.shares_tail = child.shares_tail = True

    def drain_copies(self) -> list[BlockCopy]:
        """Blocks that must be copied before the next step because of forks, each once."""
        return [copy for states in self._states.values() for copy in states.drain_copies()]

    def hand_over(self, seq: Sequence, heir: Sequence) -> None:
        """Transfer a sequence's blocks and slot to another sequence with the same prompt."""
        heir.take_slot(seq.slot, seq.tables)
        seq.slot, seq.sampled = NO_SLOT, None
        seq.tables = []
        # To the runner the slot belongs to another sequence now: its tables are sent again as a whole.
        for table in heir.tables:
            table.keep_sent(0)
        heir.num_computed, heir.num_committed, heir.node = seq.num_computed, seq.num_committed, seq.node
        heir.num_cached_tokens = seq.num_cached_tokens
        heir.num_prompt_logprobs = seq.num_prompt_logprobs
        seq.num_computed, seq.num_committed, seq.node = 0, 0, None

    def commit(self, seq: Sequence) -> None:
        """Insert full computed blocks into the prefix tree, and release blocks behind windows."""
        size = self.block_size
        if self.caching:
            for i in range(seq.num_committed, seq.num_computed // size):
                assert seq.node is not None
                seq.node = self.cache.child(seq.node, block_key(seq.tokens, seq.request.images, i, size))
                for group, table in enumerate(seq.tables):
                    if isinstance(table, StateTable):
                        self._states[group].insert(seq, seq.node, table, i)
                    else:
                        self._insert(group, seq.node, table, i)
                if self.cache.listener is not None:
                    self.cache.listener.computed(seq.node)
        seq.num_committed = seq.num_computed // size
        for group in self._windowed:
            table = seq.tables[group]
            if isinstance(table, StateTable):
                self._states[group].commit(seq, table)
            else:
                self._free_behind(group, seq)

    def _insert(self, group: int, node: Node, table: BlockTable, i: int) -> None:
        block = table.blocks[i]
        known = self.cache.insert(group, node, block)
        # The sequence switches to an equal block of the tree: so in a group without a window, the holder of a block
        # holds its ancestors in the tree, and an idle block has no held ones below it.
        if known != block:
            self.cache.hold(group, known)
            table.blocks[i] = known
            table.keep_sent(i)
            self.cache.drop(group, block)

    def _free_behind(self, group: int, seq: Sequence) -> None:
        """Release the blocks that no later query sees. Those in the prefix tree become idle."""
        table = seq.tables[group]
        first = self.first_seen(group, seq.num_committed * self.block_size)
        for block in table.blocks[table.first : first]:
            self.cache.drop(group, block)
        table.first = first

    def release(self, seq: Sequence) -> None:
        """Release a sequence's slot and its blocks, deepest first; blocks in the prefix tree become idle."""
        if seq.slot != NO_SLOT:
            self._free_slots.append(seq.slot)
            seq.slot, seq.sampled = NO_SLOT, None
        for group, table in enumerate(seq.tables):
            if isinstance(table, StateTable):
                self._states[group].release(table)
            for block in reversed(table.held):  # deepest first: the least recently used idle block is always a leaf
                self.cache.drop(group, block)
        if seq.node is not None:
            self.cache.leave(seq.node)
        seq.tables = []
        seq.num_computed = seq.num_committed = seq.num_returned = 0
        seq.node = None
        seq.shares_tail = False

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that blocks and slots are conserved, the tree is sound, and tables cover the computed tokens."""
        sequences = list(sequences)
        held: list[list[int]] = [[] for _ in self.pools]
        slots = self._free_slots[:]
        users: Counter[int] = Counter()
        for seq in sequences:
            self._check_tables(seq)
            for group, table in enumerate(seq.tables):
                held[group].extend(table.held)
            if seq.node is not None:
                users[id(seq.node)] += 1
                assert seq.node.users >= users[id(seq.node)], "a node is used by more than it counts"
            if seq.sampled is not None:
                assert (seq.sampled.slot, seq.sampled.tokens) == (seq.slot, seq.tokens), f"{seq} is sampled as another"
                assert seq.sampled.tokens is seq.tokens, f"{seq} is sampled after tokens that it had"
                slots.append(seq.slot)
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost, or assigned twice"
        listener = self.cache.listener
        if listener is not None:
            for group, of_group in enumerate(held):
                of_group.extend(listener.held_blocks(group))
            listener.check_integrity()
        for group, pool in enumerate(self.pools):
            pool.check_integrity(held[group], self.cache.blocks(group))
        for states in self._states.values():
            states.check_integrity([seq for seq in sequences if seq.tables])
        self.cache.check_integrity(self._windows)

    def _check_tables(self, seq: Sequence) -> None:
        assert (seq.slot != NO_SLOT) == bool(seq.tables), f"{seq} has a slot or blocks, not both"
        for group, table in enumerate(seq.tables):
            assert len(table.blocks) * self.block_size >= seq.num_computed, f"{seq} computed past its blocks"
            assert len(set(table.held)) == len(table.held), f"{seq} has a block twice"
            first = self.first_seen(group, seq.num_committed * self.block_size)
            assert group in self._states or table.first == first, f"{seq} holds other blocks than those that it sees"
