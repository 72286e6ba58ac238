"""A step's plan laid out by every version, against one token at a time; and the division of its attention."""

import ctypes
import itertools
from array import array
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import ForwardPlan
from penstock.kernels.attention.reference import Seen, plan_attention
from penstock.kernels.batch import Batch, Column, RecordedBatch
from penstock.kernels.ops import Ops
from penstock.native import structs
from penstock.native.array import CannotRecordError
from penstock.runner.forward import build_batch
from tests.kernels.versions import REFERENCE, VERSIONS

BLOCK_SIZE = 4
CPU = torch.device("cpu")
Tables = list["array[int]"]


def forward_plan(query_lens: list[int], starts: list[int], token_ids: "array[int]") -> ForwardPlan:
    return ForwardPlan(query_lens, starts, token_ids, list(range(len(query_lens))), [], [], [])


def lay_out(plan: ForwardPlan, tables: Tables, ops: Ops) -> Batch:
    return build_batch(plan, tables, BLOCK_SIZE, ops, CPU)


@st.composite
def plans(draw: st.DrawFn) -> tuple[ForwardPlan, Tables]:
    lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    starts = [draw(st.integers(0, 13)) for _ in lens]
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    needed = [-(-end // BLOCK_SIZE) + draw(st.integers(0, 2)) for end in ends]
    blocks = draw(st.permutations(range(sum(needed) + 3)))
    tables = [array("i", [blocks.pop() for _ in range(count)]) for count in needed]
    tokens = array("i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(lens), max_size=sum(lens))))
    return forward_plan(lens, starts, tokens), tables


@pytest.mark.parametrize("ops", VERSIONS)
@given(planned=plans())
def test_every_token_gets_its_position_and_slot(ops: Ops, planned: tuple[ForwardPlan, Tables]) -> None:
    plan, block_tables = planned
    batch = lay_out(plan, block_tables, ops)
    positions, slots = [], []
    for start, length, table in zip(plan.starts, plan.query_lens, block_tables, strict=True):
        for position in range(start, start + length):
            positions.append(position)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    assert batch.token_ids.tolist() == batch.column("token_ids").tolist() == plan.token_ids.tolist()
    assert batch.positions.tolist() == batch.column("positions").tolist() == positions
    assert batch.column("slots").tolist() == slots
    assert batch.pool_blocks == max(map(max, block_tables)) + 1


@pytest.mark.parametrize("ops", VERSIONS)
@given(planned=plans())
def test_every_sequence_has_its_length_and_its_blocks(ops: Ops, planned: tuple[ForwardPlan, Tables]) -> None:
    plan, block_tables = planned
    batch = lay_out(plan, block_tables, ops)
    query_start, table_start = batch.column("query_start").tolist(), batch.column("table_start").tolist()
    blocks = batch.column("blocks").tolist()
    assert np.diff(query_start).tolist() == plan.query_lens
    assert query_start[0] == table_start[0] == 0
    ends = [start + count for start, count in zip(plan.starts, plan.query_lens, strict=True)]
    assert batch.column("seq_lens").tolist() == ends
    tables = [blocks[first:last] for first, last in itertools.pairwise(table_start)]
    assert tables == [table.tolist() for table in block_tables]


@given(plans())
def test_native_kernels_read_the_same_columns(planned: tuple[ForwardPlan, Tables]) -> None:
    plan, block_tables = planned
    batch = lay_out(plan, block_tables, REFERENCE)
    told = structs.Batch.from_address(batch.handle)
    assert (told.num_tokens, told.num_seqs) == (len(plan.token_ids), len(plan.query_lens))
    names: tuple[Any, ...] = ("query_start", "seq_lens", "table_start", "blocks", "slots")
    for name in names:
        column = batch.column(name)
        assert np.frombuffer(ctypes.string_at(getattr(told, name), column.nbytes), np.int32).tolist() == column.tolist()


@given(plans())
def test_every_sequence_is_attended_to_once_with_its_own_blocks(planned: tuple[ForwardPlan, Tables]) -> None:
    plan, block_tables = planned
    batch = lay_out(plan, block_tables, REFERENCE)
    division, seen = plan_attention(batch, BLOCK_SIZE, 64, Seen()), {}
    for group in division.decodes:
        lengths = [group.most_keys] if group.mask is None else group.mask.sum(1).tolist()
        for row, table, length in zip(group.rows.tolist(), group.block_table, lengths, strict=True):
            seen[row] = (1, length, table.tolist())
    for chunk in division.chunks:
        seen[chunk.row] = (chunk.query_len, chunk.start + chunk.query_len, chunk.block_table.tolist())
    starts = batch.column("query_start").tolist()
    assert sorted(seen) == starts[:-1]
    for index, row in enumerate(starts[:-1]):
        query_len, length, table = seen[row]
        used = -(-length // BLOCK_SIZE)
        assert query_len == plan.query_lens[index]
        assert length == plan.starts[index] + plan.query_lens[index]
        assert table[:used] == block_tables[index].tolist()[:used]


@pytest.mark.parametrize("ops", VERSIONS)
def test_a_block_table_that_ends_before_its_sequence_is_noticed(ops: Ops) -> None:
    tables = [array("i", [3, 4]), array("i", [1])]
    plan = forward_plan([1, 2], [0, BLOCK_SIZE - 1], array("i", [1, 2, 3]))
    with pytest.raises(AssertionError, match="a block table ends before its sequence"):
        lay_out(plan, tables, ops)


def test_what_the_first_layer_derives_from_a_batch_is_there_for_the_others() -> None:
    plan, calls = forward_plan([1], [0], array("i", [7])), []

    def make(batch: Batch, factor: int) -> int:
        calls.append(factor)
        return factor * batch.num_tokens

    batch = lay_out(plan, [array("i", [2])], REFERENCE)
    assert [batch.derived(make, 3), batch.derived(make, 3), batch.derived(make, 4)] == [3, 3, 4]
    assert calls == [3, 4]


@pytest.mark.parametrize("name", get_args(Column))
def test_a_recorded_pass_cannot_depend_on_one_steps_columns(name: Column) -> None:
    with pytest.raises(CannotRecordError, match=f"the batch's {name}"):
        RecordedBatch().column(name)
    with pytest.raises(CannotRecordError, match=f"the batch's {name}"):
        RecordedBatch().tensor(name)
