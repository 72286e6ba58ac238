"""States of recurrent layers: the block of each sequence's live state, and the checkpoints kept by the prefix cache.

A state summarises all tokens before it. A sequence continues from its *live* state and does not need earlier ones.
Other sequences do: a later turn of a chat, or the sequence itself after preemption, continues from a *checkpoint*, a
state at a block border that is in the prefix tree.

    index in the table    0   1   2   3   4       block_size 32
    block                 7   7   7   4   9       computed: 140 tokens
                                  │   │   └─────  live: after 140 tokens
                                  │   └─────────  checkpoint after 128 tokens
                                  └─────────────  checkpoint after 96 tokens

Index i names the block that holds the state while, and after, the tokens of block i are computed. So a step that
continues after `start` tokens reads the state at index `(start - 1) // block_size`. Where the block number changes from
one index to the next, the state continues in the new block and the old one is unchanged; otherwise it is updated in
place. A table ends at the index of the next token, whose block is the live one, owned by the sequence alone and not in
the tree.

Checkpoints are made at the last border of each step's chunk, every `checkpoint_every` blocks, at the last border before
the prompt's last token, and where a prompt diverged from a text in the tree, as others may diverge there, too. A
checkpoint made only as the last of its chunk is discarded when the sequence reaches its next one. A sequence holds a
checkpoint only until it has read it.

Drafts may be rejected, so they update a copy of the state, a *branch*: a block that the sequence has for that step
only. If all drafts are accepted, the branch becomes the live block. Otherwise it is freed, and the state is that after
the token before the drafts; the accepted ones are recomputed in the next step, which may have drafts again. Drafts end
at a border, so that no checkpoint is missed.

The pool never runs out. Each sequence slot is guaranteed one block, the live one. Any other block (a checkpoint, a
branch, a hit without another holder) is taken only if as many blocks stay available as there are free slots. So a pool
with as many blocks as slots suffices, and each additional block can keep a checkpoint.
"""

from array import array

from penstock.core.plan import BlockCopy
from penstock.core.prefix_cache import NO_BLOCK, BlockPool, Node, PrefixCache
from penstock.core.sequence import INT32, BlockTable, Sequence


class StateTable(BlockTable):
    """A sequence's blocks of a group of states. Equal numbers are adjacent, and are one block."""

    __slots__ = ("branch", "left_at", "passing")

    def __init__(self, blocks: "array[int]", first: int = 0) -> None:
        super().__init__(blocks, first)
        self.passing: tuple[Node, int] | None = None
        """(Node, block) of the sequence's latest checkpoint, if it is discarded at the next one."""
        self.branch = NO_BLOCK
        """The block with the drafts of the current step."""
        self.left_at = 0
        """The border at which its tokens diverged from the prefix tree when it was admitted."""

    @property
    def held(self) -> "array[int]":
        blocks = self.blocks[self.first :]
        return array(INT32, [block for index, block in enumerate(blocks) if index == 0 or block != blocks[index - 1]])


class StateGroup:
    """The blocks of one cache group of states."""

    def __init__(
        self,
        group: int,
        pool: BlockPool,
        cache: PrefixCache,
        free_slots: list[int],
        block_size: int,
        checkpoint_every: int | None,
    ) -> None:
        """
        Args:
            free_slots: the unused sequence slots; updated by the KV manager.
            checkpoint_every: interval in blocks; None: there are no checkpoints.
        """
        assert pool.num_blocks >= len(free_slots), "each slot needs a state"
        self._group = group
        self._pool = pool
        self._cache = cache
        self._free_slots = free_slots
        self._block_size = block_size
        self._every = checkpoint_every
        self._copies: list[BlockCopy] = []
        self._superseded: list[tuple[Node, int]] = []  # (node, block) of checkpoints that the current commit replaces

    @property
    def _num_spare(self) -> int:
        """Available blocks beyond those guaranteed to free slots."""
        return self._pool.num_free + self._pool.num_idle - len(self._free_slots)

    def begin(self, table: StateTable, path: list[Node], left_at: int) -> None:
        """Allocate the live block of a sequence that has just taken a slot, after the state at the end of a hit.

        The hit's own state becomes the live one if no other block can be spared.
        """
        table.left_at = left_at
        if not path:
            table.blocks.append(self._cache.take(self._group))
            return
        table.first = len(path) - 1
        table.blocks.extend([0] * table.first)
        hit = path[-1].blocks[self._group]
        can_keep = self._pool.refs(hit) > 0 or self._num_spare > 1
        self._cache.hold(self._group, hit)
        if can_keep:
            table.blocks.extend([hit, self._cache.take(self._group)])
        else:
            self._cache.forget(self._group, hit)
            table.blocks.extend([hit, hit])

    def extend(self, seq: Sequence, table: StateTable, num_tokens: int) -> None:
        """Extend the table to the token after the first `num_tokens`, with the checkpoints up to there."""
        self._drop_passed(seq, table)
        blocks, last = table.blocks, num_tokens // self._block_size
        for border in range(len(blocks), last + 1):
            is_wanted = self._every is not None and (border == last or self._is_lasting(seq, table, border))
            blocks.append(self._cache.take(self._group) if is_wanted and self._num_spare > 0 else blocks[-1])

    def _is_lasting(self, seq: Sequence, table: StateTable, border: int) -> bool:
        """Whether a checkpoint at this border outlives the sequence's next one."""
        periodic = self._every is not None and border % self._every == 0
        return periodic or border in ((seq.num_prompt_tokens - 1) // self._block_size, table.left_at)

    def insert(self, seq: Sequence, node: Node, table: StateTable, index: int) -> None:
        """Insert the computed state at the end of an index's block into the tree, if it is a checkpoint.

        If the node already has one that another sequence computed, this one is freed once it is no longer held.
        """
        block = table.blocks[index]
        if block == table.blocks[index + 1]:
            return
        # A chat continues from the newest checkpoint, so the one before it is of no use to the next turn.
        if table.passing is not None:
            self._superseded.append(table.passing)
            table.passing = None
        if node.blocks[self._group] == NO_BLOCK:
            self._cache.insert(self._group, node, block)
            table.passing = None if self._is_lasting(seq, table, index + 1) else (node, block)

    def commit(self, seq: Sequence, table: StateTable) -> None:
        """Release the sequence's older states once its checkpoints are in the tree."""
        self._drop_passed(seq, table)
        for node, block in self._superseded:
            if node.blocks[self._group] == block:
                self._cache.discard(self._group, block)
        self._superseded.clear()

    def _drop_passed(self, seq: Sequence, table: StateTable) -> None:
        """Release the states before the one that the sequence continues from."""
        first = max(0, seq.num_computed - 1) // self._block_size
        for index in range(table.first, first):
            if table.blocks[index] != table.blocks[index + 1]:
                self._cache.drop(self._group, table.blocks[index])
        table.first = first

    def most_drafts(self, seq: Sequence) -> int:
        """Maximum number of drafts after the sequence's last token."""
        return self._block_size - len(seq.tokens) % self._block_size if self._num_spare > 0 else 0

    def begin_drafts(self, table: StateTable) -> None:
        """Allocate a branch; there must be room for drafts: see `most_drafts`."""
        assert table.branch == NO_BLOCK, "drafts are judged before others are made"
        table.branch = self._cache.take(self._group)

    def keep_drafts(self, seq: Sequence, table: StateTable, num_tokens: int) -> None:
        """Make the branch the live block after all drafts were accepted. The token before is committed."""
        last = len(table.blocks) - 1
        live = table.blocks[last]
        self._drop_passed(seq, table)
        # Otherwise the block is also a checkpoint of the index before, and stays held for it.
        if last == table.first or table.blocks[last - 1] != live:
            self._cache.drop(self._group, live)
        table.blocks[last], table.branch = table.branch, NO_BLOCK
        table.keep_sent(last)
        self.extend(seq, table, num_tokens)

    def drop_drafts(self, table: StateTable) -> None:
        """Release the branch, if there is one."""
        if table.branch != NO_BLOCK:
            self._cache.drop(self._group, table.branch)
            table.branch = NO_BLOCK

    def fork(self, parent: Sequence, table: StateTable) -> StateTable:
        """The table of a sequence forked from `parent`, with its own live state."""
        child = StateTable(table.blocks[:], table.first)
        child.left_at = table.left_at
        for block in table.held[:-1]:
            self._cache.hold(self._group, block)
        live, own = table.blocks[-1], self._cache.take(self._group)
        index = len(table.blocks) - 1
        # Equal numbers are one block: all indices that the live state stands for become the child's own.
        while index >= table.first and table.blocks[index] == live:
            child.blocks[index] = own
            index -= 1
        if child.blocks[(parent.num_computed - 1) // self._block_size] == own:
            self._copies.append(BlockCopy(self._group, live, own))
        return child

    def drain_copies(self) -> list[BlockCopy]:
        """Live states to copy before the next step, each once."""
        copies, self._copies = self._copies, []
        return copies

    def release(self, table: StateTable) -> None:
        """Cancel copies to the blocks of a sequence that is about to be released."""
        self.drop_drafts(table)
        if self._copies:
            held = table.held
            self._copies = [copy for copy in self._copies if copy.target not in held]

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that every sequence has its own live state, and each free slot could have one."""
        assert self._num_spare >= 0, "a free slot could have no state"
        targets = [copy.target for copy in self._copies]
        assert len(set(targets)) == len(targets), "two states are copied to one block"
        for seq in sequences:
            table = seq.tables[self._group]
            blocks = table.blocks
            assert table.first <= max(0, seq.num_computed - 1) // self._block_size, f"{seq} gave its state up"
            assert isinstance(table, StateTable)
            assert table.branch == NO_BLOCK, f"{seq} has a branch between steps"
            assert len(blocks) == seq.num_computed // self._block_size + 1, f"{seq} has a state too few or too many"
            assert self._pool.refs(blocks[-1]) == 1, f"{seq} shares its live state"
            assert not self._cache.contains(self._group, blocks[-1]), f"the live state of {seq} can be evicted"
