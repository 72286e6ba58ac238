"""A plan's tensors against one token at a time."""

from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import SampleBatch, StepPlan
from penstock.runner.inputs import build_inputs
from tests.stepping import sample_rows

BLOCK_SIZE = 4


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    starts = [draw(st.integers(0, 13)) for _ in lens]
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    needed = [-(-end // BLOCK_SIZE) + draw(st.integers(0, 2)) for end in ends]
    blocks = draw(st.permutations(range(sum(needed) + 3)))
    tables = [array("i", [blocks.pop() for _ in range(count)]) for count in needed]
    rows = draw(st.lists(st.integers(0, sum(lens) - 1), max_size=6))
    tokens = array("i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(lens), max_size=sum(lens))))
    return StepPlan(lens, starts, tokens, tables, [], sample_rows(rows, [0] * len(rows)))


@given(plans())
def test_every_token_gets_its_position_and_slot(plan: StepPlan) -> None:
    inputs = build_inputs(plan, BLOCK_SIZE, 64, torch.device("cpu"))
    positions, slots = [], []
    for start, length, table in zip(plan.starts, plan.query_lens, plan.block_tables, strict=True):
        for position in range(start, start + length):
            positions.append(position)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    assert inputs.token_ids.tolist() == plan.token_ids.tolist()
    assert inputs.positions.tolist() == positions
    assert inputs.batch.slot_mapping.tolist() == slots
    assert inputs.sampled_rows.tolist() == plan.samples.rows


@given(plans())
def test_every_sequence_is_attended_to_once_with_its_own_blocks(plan: StepPlan) -> None:
    batch = build_inputs(plan, BLOCK_SIZE, 64, torch.device("cpu")).batch
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
        assert table[:used] == plan.block_tables[index].tolist()[:used]
        assert batch.block_tables[index, :used].tolist() == table[:used]


def test_a_plan_that_samples_nothing_has_no_sampled_rows() -> None:
    plan = StepPlan([2], [0], array("i", [1, 2]), [array("i", [0])], [], SampleBatch())
    assert build_inputs(plan, BLOCK_SIZE, 64, torch.device("cpu")).sampled_rows.tolist() == []
