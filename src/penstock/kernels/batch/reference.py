"""The layout of a step, in numpy."""

from array import array
from collections.abc import Sequence

import numpy as np

from penstock.kernels.batch import IntArray


def lay_out(
    query_lens: Sequence[int],
    starts: Sequence[int],
    block_tables: Sequence["array[int]"],
    token_ids: "array[int]",
    block_size: int,
) -> tuple[IntArray, int]:
    """See `LayOut` in `penstock.kernels.batch`."""
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
