"""A plan's tensors against one token at a time, and what the native kernels get against these tensors."""

import ctypes
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import native
from penstock.core.plan import ForwardPlan
from penstock.runner.inputs import build_inputs, build_packed_inputs
from tests.stepping import plan_of

BLOCK_SIZE = 4
Laid = tuple[ForwardPlan, "list[array[int]]"]


@st.composite
def plans(draw: st.DrawFn) -> Laid:
    lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    starts = [draw(st.integers(0, 13)) for _ in lens]
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    needed = [-(-end // BLOCK_SIZE) + draw(st.integers(0, 2)) for end in ends]
    blocks = draw(st.permutations(range(sum(needed) + 3)))
    tables = [array("i", [blocks.pop() for _ in range(count)]) for count in needed]
    rows = draw(st.lists(st.integers(0, sum(lens) - 1), max_size=6))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(lens), max_size=sum(lens)))
    parts = [(start, [tokens.pop() for _ in range(length)]) for start, length in zip(starts, lens, strict=True)]
    return plan_of(parts, tables, rows).forward, tables


@given(plans())
def test_every_token_gets_its_position_and_slot(laid: Laid) -> None:
    plan, tables = laid
    inputs = build_inputs(plan, tables, BLOCK_SIZE, 64, torch.device("cpu"))
    positions, slots = [], []
    for start, length, table in zip(plan.starts, plan.query_lens, tables, strict=True):
        for position in range(start, start + length):
            positions.append(position)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    assert inputs.token_ids.tolist() == plan.token_ids.tolist()
    assert inputs.positions.tolist() == positions
    assert inputs.batch.slot_mapping.tolist() == slots
    assert inputs.sampled_rows.tolist() == plan.sampled_rows


@given(plans())
def test_every_sequence_is_attended_to_once_with_its_own_blocks(laid: Laid) -> None:
    plan, tables = laid
    batch = build_inputs(plan, tables, BLOCK_SIZE, 64, torch.device("cpu")).batch
    seen = {}
    for group in batch.decodes:
        for row, table, length in zip(group.rows.tolist(), group.block_table, group.seq_lens.tolist(), strict=True):
            seen[row] = (1, length, table.tolist())
    for chunk in batch.chunks:
        seen[chunk.row] = (chunk.query_len, chunk.start + chunk.query_len, chunk.block_table.tolist())
    starts = batch.query_start.tolist()
    assert sorted(seen) == starts[:-1]
    for index, row in enumerate(starts[:-1]):
        query_len, length, table = seen[row]
        used = -(-length // BLOCK_SIZE)
        assert query_len == plan.query_lens[index]
        assert length == batch.seq_lens[index] == plan.starts[index] + plan.query_lens[index]
        assert table[:used] == tables[index].tolist()[:used]
        assert batch.block_tables[index, :used].tolist() == table[:used]


def test_a_plan_that_samples_nothing_has_no_sampled_rows() -> None:
    tables = [array("i", [0])]
    plan = plan_of([(0, [1, 2])], tables).forward
    assert build_inputs(plan, tables, BLOCK_SIZE, 64, torch.device("cpu")).sampled_rows.tolist() == []


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")
@given(plans())
def test_native_kernels_get_the_same(laid: Laid) -> None:
    plan, tables = laid
    inputs, packed = (
        build_inputs(plan, tables, BLOCK_SIZE, 64, torch.device("cpu")),
        build_packed_inputs(plan, tables, BLOCK_SIZE),
    )
    assert packed.token_ids.tolist() == inputs.token_ids.tolist()
    assert packed.positions.tolist() == inputs.positions.tolist()
    assert packed.num_blocks == max(map(max, tables)) + 1
    num_tokens, num_seqs, width, *columns = np.frombuffer(ctypes.string_at(packed.batch.handle, 56), np.int64).tolist()
    padded = inputs.batch.block_tables
    assert (num_tokens, num_seqs, width) == (len(inputs.token_ids), *padded.shape)
    wanted = (inputs.batch.query_start, inputs.batch.seq_lens, padded.reshape(-1), inputs.batch.slot_mapping)
    for address, column in zip(columns, wanted, strict=True):
        assert np.frombuffer(ctypes.string_at(address, 8 * len(column)), np.int64).tolist() == column.tolist()


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")
def test_a_block_table_that_ends_before_its_sequence_is_noticed() -> None:
    tables = [array("i", [3, 4]), array("i", [1])]
    plan = plan_of([(0, [1]), (BLOCK_SIZE - 1, [2, 3])], tables).forward
    with pytest.raises(AssertionError, match="a block table ends before its sequence"):
        build_packed_inputs(plan, tables, BLOCK_SIZE)
