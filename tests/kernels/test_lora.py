"""What adapters add to linear maps, in every version against products in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import native
from penstock.config.weight_formats import FLOAT
from penstock.kernels.arrays import array_of
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.lora import LoraMap, LoraTable
from penstock.kernels.lora.rows import AdapterRows
from penstock.kernels.ops import Ops
from tests.kernels.versions import VERSIONS, native_table, needs_native

CPU = torch.device("cpu")
ROWS, COLUMNS = 150, 77
MAPS = {0: [(0, 70, 4)], 1: [(0, 70, 17), (70, 30, 1), (100, 50, 64)], 5: [(70, 80, 256)]}
"""(first row, rows, rank) of what each slot has."""

versions = pytest.mark.parametrize("ops", VERSIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def maps_of(slot: int, dtype: torch.dtype) -> list[LoraMap]:
    random = torch.Generator().manual_seed(slot)
    return [
        LoraMap(
            first,
            rows,
            0.5 + slot,
            torch.randn(rank, COLUMNS, generator=random).to(dtype),
            torch.randn(rank, rows, generator=random).to(dtype),
        )
        for first, rows, rank in MAPS[slot]
    ]


def table(ops: Ops, dtype: torch.dtype) -> LoraTable:
    made = ops.new_lora(ROWS, COLUMNS, dtype, CPU)
    for slot in MAPS:
        made.put(slot, maps_of(slot, dtype))
    return made


def rows_of(slots: list[int]) -> AdapterRows:
    rows = AdapterRows()
    rows.assign(np.array(slots, np.int32))
    return rows


def added(ops: Ops, x: Tensor, slots: list[int]) -> Tensor:
    update = table(ops, x.dtype).update(x, rows_of(slots))
    assert update is not None
    return update.added


def expected(x: Tensor, slots: list[int]) -> Tensor:
    made = torch.zeros(len(x), ROWS, dtype=torch.float64)
    for row, slot in enumerate(slots):
        for part in maps_of(slot, x.dtype) if slot >= 0 else ():
            ranks = part.scale * (part.a.double() @ x[row].double())
            made[row, part.first : part.first + part.rows] = ranks @ part.b.double()
    return made


SLOTS = [5, -1, 0, 1, 1, 0, -1, 5, 1, 1, 1, 1, 0, 5, -1, 1]


@versions
@dtypes
def test_each_row_gets_what_its_adapter_has_for_each_map(ops: Ops, dtype: torch.dtype) -> None:
    x = torch.randn(len(SLOTS), COLUMNS, generator=torch.Generator().manual_seed(9)).to(dtype)
    made = added(ops, x, SLOTS)
    torch.testing.assert_close(made.double(), expected(x, SLOTS), rtol=2e-5, atol=2e-3)


@versions
def test_rows_without_an_adapter_and_maps_that_it_does_not_have_stay_as_they_are_to_the_bit(ops: Ops) -> None:
    made = added(ops, torch.randn(3, COLUMNS), [0, -1, 5])
    zeros = torch.tensor([0.0, -0.0]).repeat(ROWS // 2)
    for row, part in ((0, slice(70, ROWS)), (1, slice(0, ROWS)), (2, slice(0, 70))):
        assert torch.equal((zeros[part] + made[row, part]).view(torch.int32), zeros[part].view(torch.int32))


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
def test_a_rows_bits_do_not_depend_on_the_others(threads: int) -> None:
    before = native.num_threads()
    native.set_num_threads(threads)
    try:
        ops, rng = native_table(), np.random.default_rng(3)
        x = torch.randn(90, COLUMNS, generator=torch.Generator().manual_seed(1))
        slots = [int(slot) for slot in rng.choice([-1, 0, 1, 5, 5, 5], 90)]
        together = added(ops, x, slots)
        for row in (0, 1, 40, 89):
            if slots[row] >= 0:
                assert torch.equal(together[row], added(ops, x[row : row + 1], [slots[row]])[0])
        order = rng.permutation(90)
        assert torch.equal(added(ops, x[order].contiguous(), [slots[i] for i in order]), together[order])
    finally:
        native.set_num_threads(before)


@versions
def test_an_emptied_slot_adds_nothing_and_can_be_filled_again(ops: Ops) -> None:
    made, x = table(ops, torch.float32), torch.randn(2, COLUMNS)
    made.clear(1)
    update = made.update(x, rows_of([1, 0]))
    assert update is not None
    assert not update.added[0].any()
    assert update.added[1].any()
    made.put(1, maps_of(0, torch.float32))
    again = made.update(x[:1], rows_of([1]))
    assert again is not None
    assert torch.equal(again.added[0], added(ops, x[:1], [0])[0])


@versions
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_it_is_added_before_the_activation(ops: Ops, gated: bool, joined: bool) -> None:
    rows = 100
    weights = torch.randn(rows, COLUMNS) / 9
    parts = [
        ops.new_weight(n, COLUMNS, FLOAT, gated=gated and not joined, dtype=torch.float32, device=CPU)
        for n in ((50, 50) if joined else (rows,))
    ]
    for first, part in zip((0, 50), parts, strict=False):
        part.load(0, array_of(weights[first : first + part.rows]))
    gate = "silu" if gated else None
    linear_map = JoinedWeight(parts, gate, ops.empty_rows) if joined else parts[0]
    lora = ops.new_lora(rows, COLUMNS, torch.float32, CPU)
    a, b = torch.randn(3, COLUMNS), torch.randn(3, rows)
    lora.put(7, [LoraMap(0, rows, 0.25, a, b)])
    x, bias = torch.randn(5, COLUMNS), torch.randn(rows)
    update = lora.update(x, rows_of([7, -1, 7, 7, -1]))
    y = linear_map.linear(x, bias, torch.float32, update)
    plain = linear_map.linear(x, bias, torch.float32)
    assert torch.equal(y[[1, 4]], plain[[1, 4]])
    wanted = x @ weights.T + bias + 0.25 * (x @ a.T) @ b
    if gated:
        wanted = torch.nn.functional.silu(wanted[:, :50]) * wanted[:, 50:]
    torch.testing.assert_close(y[[0, 2, 3]], wanted[[0, 2, 3]], rtol=1e-4, atol=1e-3)


@needs_native
def test_a_pass_without_adapters_does_not_read_what_was_to_be_added() -> None:
    ops = native_table()
    weight = ops.new_weight(64, COLUMNS, FLOAT, gated=False, dtype=torch.float32, device=CPU)
    weight.load(0, array_of(torch.randn(64, COLUMNS)))
    rows = AdapterRows()
    rows.assign(None)
    x = torch.randn(4, COLUMNS)
    update = ops.new_lora(64, COLUMNS, torch.float32, CPU).update(x, rows)
    assert update is not None
    update.added.fill_(torch.nan)
    assert torch.equal(weight.linear(x, None, torch.float32, update), weight.linear(x, None, torch.float32))


@versions
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_dora_multiplies_the_products_and_not_the_bias_of_its_rows_alone(ops: Ops, gated: bool, joined: bool) -> None:
    rows = 100
    weights = torch.randn(rows, COLUMNS) / 9
    parts = [
        ops.new_weight(n, COLUMNS, FLOAT, gated=gated and not joined, dtype=torch.float32, device=CPU)
        for n in ((50, 50) if joined else (rows,))
    ]
    for first, part in zip((0, 50), parts, strict=False):
        part.load(0, array_of(weights[first : first + part.rows]))
    gate = "silu" if gated else None
    linear_map = JoinedWeight(parts, gate, ops.empty_rows) if joined else parts[0]
    lora = ops.new_lora(rows, COLUMNS, torch.float32, CPU)
    a, b, factors = torch.randn(3, COLUMNS), torch.randn(3, 40), torch.rand(40) + 0.5
    lora.put(7, [LoraMap(30, 40, 0.25, a, b, factors.numpy())])
    lora.put(2, [LoraMap(30, 40, 0.25, a, b)])
    x, bias = torch.randn(5, COLUMNS), torch.randn(rows)
    y = linear_map.linear(x, bias, torch.float32, lora.update(x, rows_of([7, -1, 2, 7, -1])))
    plain = linear_map.linear(x, bias, torch.float32)
    without = linear_map.linear(x, bias, torch.float32, lora.update(x, rows_of([-1, -1, 2, -1, -1])))
    assert torch.equal(y[[1, 4]], plain[[1, 4]])
    assert torch.equal(y[2], without[2])
    wanted = x @ weights.T
    wanted[:, 30:70] = wanted[:, 30:70] * factors + 0.25 * (x @ a.T) @ b
    wanted += bias
    if gated:
        wanted = torch.nn.functional.silu(wanted[:, :50]) * wanted[:, 50:]
    torch.testing.assert_close(y[[0, 3]], wanted[[0, 3]], rtol=1e-4, atol=1e-3)


@versions
@dtypes
def test_an_embeddings_updates_are_added_to_the_rows_with_adapters(ops: Ops, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(4)
    table = ops.new_lookup_table(COLUMNS, dtype, CPU)
    a, b = (torch.randn(*shape, generator=random).to(dtype) for shape in ((30, 19), (19, COLUMNS)))
    table.put(5, [LoraMap(0, COLUMNS, 0.5, a, b)])
    found, ids = torch.randn(6, COLUMNS, generator=random).to(dtype), torch.tensor([3, 29, 0, 3, 7, 29])
    y = found.clone()
    table.add(y, ids, rows_of([5, 5, -1, 5, 2, -1]))
    assert torch.equal(y[[2, 4, 5]], found[[2, 4, 5]])
    wanted = found[[0, 1, 3]].double() + 0.5 * a[[3, 29, 3]].double() @ b.double()
    torch.testing.assert_close(y[[0, 1, 3]], wanted.to(dtype), rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-4)
    table.clear(5)
    again = found.clone()
    table.add(again, ids, rows_of([5] * 6))
    assert torch.equal(again, found)
