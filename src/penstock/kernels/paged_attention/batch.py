"""What attention must know of a step, built once and read by every layer.

A step's queries lie one sequence after another, ragged; its keys lie in the paged cache:

    query_start   0     3 4       8            3 sequences: a prompt chunk, a decode, a prompt chunk
    queries       a a a b c c c c
    seq_lens      35, 72, 4                    keys each sequence has once this step's are stored
    block_tables  [[4, 9, 0], [7, 2, 5], [1, 0, 0]]     padded with 0
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, whose keys are gathered together."""

    rows: Tensor
    """[group] int64: where their queries lie."""
    block_table: Tensor
    """[group, blocks] int64."""
    seq_lens: Tensor
    """[group] int64."""
    max_seq_len: int
    mask: Tensor
    """[group, max_seq_len] bool: true where there is a key."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A sequence with several queries, `row` to `row + query_len` of the step, at positions `start` and on."""

    row: int
    query_len: int
    start: int
    block_table: Tensor
    """[blocks] int64."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's ragged batch; index tensors are int64 on the device of the model."""

    query_start: Tensor
    """[num_seqs + 1]: the first row of each sequence, and at the end the number of rows."""
    seq_lens: Tensor
    """[num_seqs]: keys of each sequence, those of this step included."""
    block_tables: Tensor
    """[num_seqs, blocks], padded with 0."""
    slot_mapping: Tensor
    """[num_tokens]: where the step's keys and values go."""
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]


@dataclass(frozen=True, slots=True)
class BatchOnHost:
    """The numbers of a batch before they go to the device, for planning on the host."""

    query_lens: IntArray
    query_start: IntArray
    seq_lens: IntArray

    @classmethod
    def of(cls, query_lens: IntArray, starts: IntArray) -> "BatchOnHost":
        query_start = np.zeros(len(query_lens) + 1, np.int64)
        np.cumsum(query_lens, out=query_start[1:])
        return cls(query_lens, query_start, starts + query_lens)

    def decode_order(self) -> IntArray:
        """The sequences with one query, longest context first: neighbours waste little padding on each other."""
        decodes = np.flatnonzero(self.query_lens == 1)
        return decodes[np.argsort(-self.seq_lens[decodes], kind="stable")]


def build_batch(
    host: BatchOnHost,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    decode_order: Tensor,
    *,
    block_size: int,
    gather_limit: int,
) -> AttentionBatch:
    """Combine the device's tensors of a step with the division of its work, planned on the host.

    A group of decodes gathers at most `gather_limit` keys, padding included, unless a single sequence has more.
    """
    return AttentionBatch(
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        decodes=tuple(
            _decode_groups(host, query_start, seq_lens, block_tables, decode_order, block_size, gather_limit)
        ),
        chunks=tuple(_prompt_chunks(host, block_tables, block_size)),
    )


def _decode_groups(
    host: BatchOnHost,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    decode_order: Tensor,
    block_size: int,
    gather_limit: int,
) -> Iterator[DecodeGroup]:
    first = 0
    order = host.decode_order()
    while first < len(order):
        longest = int(host.seq_lens[order[first]])
        blocks = -(-longest // block_size)
        last = min(first + max(1, gather_limit // (blocks * block_size)), len(order))
        members = decode_order[first:last]
        lens = seq_lens.index_select(0, members)
        yield DecodeGroup(
            rows=query_start.index_select(0, members),
            block_table=block_tables.index_select(0, members)[:, :blocks],
            seq_lens=lens,
            max_seq_len=longest,
            mask=torch.arange(longest, device=lens.device) < lens.unsqueeze(1),
        )
        first = last


def _prompt_chunks(host: BatchOnHost, block_tables: Tensor, block_size: int) -> Iterator[PromptChunk]:
    for seq in np.flatnonzero(host.query_lens > 1).tolist():
        query_len, seq_len = int(host.query_lens[seq]), int(host.seq_lens[seq])
        table = block_tables[seq, : -(-seq_len // block_size)]
        yield PromptChunk(int(host.query_start[seq]), query_len, seq_len - query_len, table)
