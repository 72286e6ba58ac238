"""A step's ragged batch, laid out once and read by every layer.

A step's queries lie one sequence after another; its keys lie in the paged cache:

    query_start   0     3 4       8      3 sequences: a prompt chunk, a decode, a prompt chunk
    queries       a a a b c c c c
    seq_lens      35, 72, 4              keys each sequence has once this step's are stored
    table_start   0, 2, 5, 6
    blocks        4 9 | 7 2 5 | 1        the sequences' block tables, one after another
    slots         8 numbers              where the keys and values of each token go: block * block_size + offset
    positions     8 numbers              of each token in its sequence
    token_ids     8 numbers

A cache group of recurrent states may have `branches` [2, num_seqs], too: for each sequence a block, or NO_BRANCH, and a
number of tokens. The state after that many tokens of the step stays in the block table's block; the tokens after them
update the branch's block instead.

Where tokens see later ones, as those of an image may, `seen_ends` [num_tokens] has for each token the position after
the last key that it sees; they ascend in a sequence.
"""

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from penstock.native import Library, structs
from penstock.native.array import CannotRecordError

if TYPE_CHECKING:
    from torch import Tensor

IntArray = NDArray[np.int32]
Column = Literal["query_start", "seq_lens", "table_start", "blocks", "slots", "positions", "token_ids"]
LayOut = Callable[[Sequence[int], Sequence[int], Sequence["array[int]"], "array[int]", int], "tuple[IntArray, int]"]
"""(query_lens, starts, block tables, token ids, block_size) -> (the columns above one after another; the number of
the pool's blocks up to the last that the step uses). `starts` are the tokens of each sequence before this step.
"""

T = TypeVar("T")
NO_BRANCH = -1


class Batch:
    """The columns above, contiguous in `memory`: read as numpy arrays, as tensors, or by address in native kernels."""

    def __init__(
        self,
        memory: IntArray,
        num_seqs: int,
        num_tokens: int,
        pool_blocks: int,
        device: str,
        branches: IntArray | None = None,
        seen_ends: IntArray | None = None,
    ) -> None:
        """
        Args:
            branches: see the module's docstring; None: no sequence has one.
            seen_ends: see there; None: each token sees the keys up to its own.
        """
        assert memory.dtype == np.int32
        assert memory.flags.c_contiguous
        self.num_seqs, self.num_tokens = num_seqs, num_tokens
        self.pool_blocks = pool_blocks
        """Number of the pool's blocks up to the last that the step uses."""
        self._num_blocks = num_blocks = len(memory) - 3 * num_seqs - 2 - 3 * num_tokens
        self._memory, self._device = memory, device
        self._derived: dict[tuple[Any, ...], object] = {}
        query_start = memory.__array_interface__["data"][0]  # `ctypes.data` is slower
        seq_lens = query_start + 4 * (num_seqs + 1)
        table_start = seq_lens + 4 * num_seqs
        blocks = table_start + 4 * (num_seqs + 1)
        slots = blocks + 4 * num_blocks
        assert num_blocks >= 0
        self.branches, self.seen_ends = branches, seen_ends
        optional = (0 if column is None else column.__array_interface__["data"][0] for column in (branches, seen_ends))
        self._struct = structs.Batch(num_tokens, num_seqs, query_start, seq_lens, table_start, blocks, slots, *optional)
        self.handle = ctypes.addressof(self._struct)
        """Address of the struct that native kernels read."""

    @property
    def positions(self) -> IntArray:
        """[num_tokens], on the host."""
        return self._memory[-2 * self.num_tokens : -self.num_tokens]

    @property
    def token_ids(self) -> IntArray:
        """[num_tokens], on the host."""
        return self._memory[-self.num_tokens :]

    def column(self, name: Column) -> IntArray:
        """A column on the host."""
        first, last = self._ends[name]
        return self._memory[first:last]

    def tensor(self, name: Column) -> "Tensor":
        """For the reference: a column on the model's device, int64 as torch's indices are."""
        first, last = self._ends[name]
        return self._on_device[first:last]

    def derived(self, make: Callable[..., T], *arguments: Any) -> T:
        """`make(self, *arguments)`, computed for the first layer that asks for it and cached for the others."""
        key = (make, *arguments)
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        return cast("T", self._derived[key])

    @functools.cached_property
    def _on_device(self) -> "Tensor":
        from penstock.kernels.arrays import tensor_of  # here: it imports torch

        return tensor_of(self._memory).to(self._device).long()

    @functools.cached_property
    def _ends(self) -> dict[Column, tuple[int, int]]:
        seqs, tokens = self.num_seqs, self.num_tokens
        sizes: dict[Column, int] = {
            "query_start": seqs + 1,
            "seq_lens": seqs,
            "table_start": seqs + 1,
            "blocks": self._num_blocks,
            "slots": tokens,
            "positions": tokens,
            "token_ids": tokens,
        }
        ends = np.cumsum([0, *sizes.values()]).tolist()
        return dict(zip(sizes, itertools.pairwise(ends), strict=True))


class RecordedBatch(Batch):
    """The batch of a recorded forward pass: native kernels read each step's batch at the same address."""

    def __init__(self) -> None:
        super().__init__(np.zeros(2, np.int32), 0, 0, 0, "cpu")

    def become(self, other: Batch) -> None:
        """Take on another step's batch, at the same address."""
        # keeps alive what the native kernels read
        self._memory, self.branches, self.seen_ends = other._memory, other.branches, other.seen_ends
        ctypes.memmove(self.handle, other.handle, ctypes.sizeof(structs.Batch))

    def column(self, name: Column) -> IntArray:
        """Raise CannotRecordError: a recorded pass must not depend on one step's columns."""
        raise CannotRecordError(f"the batch's {name}")

    def tensor(self, name: Column) -> "Tensor":
        """Raise CannotRecordError, as `column`."""
        raise CannotRecordError(f"the batch's {name}")


def lay_out(
    query_lens: Sequence[int],
    starts: Sequence[int],
    block_tables: Sequence["array[int]"],
    token_ids: "array[int]",
    block_size: int,
) -> tuple[IntArray, int]:
    """Lay a step out in numpy. See `LayOut`."""
    counts, begins = np.array(query_lens, np.int64), np.array(starts, np.int64)
    table_lens = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    assert (begins + counts <= table_lens * block_size).all(), "a block table ends before its sequence"
    query_start, table_start = (np.concatenate(([0], np.cumsum(lengths))) for lengths in (counts, table_lens))
    blocks = np.frombuffer(b"".join(block_tables), np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(query_start[-1]) + (begins - query_start[:-1])[rows]
    slots = blocks[table_start[rows] + positions // block_size] * block_size + positions % block_size
    ids = np.frombuffer(token_ids, np.int32)
    columns = (query_start, begins + counts, table_start, blocks, slots, positions, ids)
    return np.concatenate(columns).astype(np.int32), int(blocks.max()) + 1


class BatchKernels:
    """Lays steps out in one native call. Each of numpy's many calls would start with cold caches, as every step streams
    all weights through them.
    """

    def __init__(self, library: Library) -> None:
        self._lay_out = library.function("penstock_lay_out", "pspllp", ctypes.c_int64)

    def lay_out(
        self,
        query_lens: Sequence[int],
        starts: Sequence[int],
        block_tables: Sequence["array[int]"],
        token_ids: "array[int]",
        block_size: int,
    ) -> tuple[IntArray, int]:
        """See `LayOut`."""
        num_seqs, num_tokens = len(block_tables), len(token_ids)
        assert sum(query_lens) == num_tokens
        numbers = array("q", [*query_lens, *starts, *map(len, block_tables)])
        tables = b"".join(block_tables)
        memory = np.empty(3 * num_seqs + 2 + len(tables) // 4 + 3 * num_tokens, np.int32)
        num_blocks = self._lay_out(
            numbers.buffer_info()[0],
            tables,
            token_ids.buffer_info()[0],
            num_seqs,
            block_size,
            memory.__array_interface__["data"][0],  # `ctypes.data` is slower
        )
        assert num_blocks > 0, "a block table ends before its sequence"
        return memory, num_blocks
