"""Gathered, scaled and summed rows and gates, against formulations of one element at a time."""

import math
from collections.abc import Callable

import pytest
import torch

from penstock.config.feed_forward import Activation
from penstock.kernels.elementwise import Columns, ElementActivation
from penstock.kernels.elementwise.reference import activate_gated
from penstock.kernels.ops import Ops
from tests.kernels.versions import REFERENCE, VERSIONS, native_table, needs_native

SHAPES = [(1, 1), (1, 7), (3, 16), (17, 33)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


GATES: dict[Activation, Callable[[float, float], float]] = {
    "silu": lambda g, u: g * sigmoid(g) * u,
    "gelu_tanh": lambda g, u: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    "clamped_swiglu": lambda g, u: min(g, 7) * sigmoid(1.702 * min(g, 7)) * (max(-7, min(u, 7)) + 1),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", GATES)
def test_the_first_half_gates_the_second(activation: Activation, shape: tuple[int, int]) -> None:
    gate, up = 6 * torch.randn(shape), 6 * torch.randn(shape)
    wanted = [
        [GATES[activation](g, u) for g, u in zip(*rows, strict=True)]
        for rows in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    made = activate_gated(torch.cat([gate, up], -1), activation)
    torch.testing.assert_close(made, torch.tensor(wanted), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("shape", [(3,), (2, 5), (33,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_gathered_in_any_order_and_repeated(ops: Ops, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = (100 * torch.randn(70, *shape)).to(dtype)
    for ids in ([], [69], [3, 0, 3, 68], [*range(70)] * 40):
        row_ids = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(ops.gather(table, row_ids), table[row_ids])


@pytest.mark.parametrize("ops", VERSIONS)
def test_each_column_is_gathered_from_the_row_of_its_axis(ops: Ops) -> None:
    table = torch.randn(50, 2, 7)
    axes = torch.tensor([0, 1, 2, 0, 2, 2, 1], dtype=torch.int32)
    for count in (1, 33):
        row_ids = torch.randint(50, (count, 3))
        expected = torch.stack([table[row_ids[:, axis], :, column] for column, axis in enumerate(axes.tolist())], -1)
        assert torch.equal(ops.gather_axes(table, row_ids, axes), expected)
        alike = row_ids[:, :1].repeat(1, 3)
        assert torch.equal(ops.gather_axes(table, alike, axes), ops.gather(table, row_ids[:, 0].contiguous()))


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_limited_and_nan_stays(ops: Ops, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(9, 40)).to(dtype)
    x[2, 8] = torch.nan
    expected = x.clone()
    expected[:, 5:24] = expected[:, 5:24].clamp(-1, 0.5)
    ops.limit(x, 5, 19, torch.tensor([-1.0]), torch.tensor([0.5]))
    assert torch.equal(x.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize("ops", VERSIONS)
def test_rows_are_scattered_and_moved_within_rows_that_lie_apart(ops: Ops) -> None:
    pool = torch.randn(40, 3, 7, 5)
    expected, part = pool.clone(), pool[:, 1]
    ids = torch.randperm(40)[:9]
    x = torch.randn(9, 7, 5)
    expected[ids, 1] = x
    ops.scatter(x, ids, part)
    assert torch.equal(pool, expected)
    assert torch.equal(ops.gather(part, ids), x)
    ops.copy_rows(part, [(0, 1), (1, 0), (0, 39)])
    expected[[1, 0, 39], 1] = expected[[0, 1, 0], 1]
    assert torch.equal(pool, expected)


ACTIVATIONS: dict[ElementActivation | None, Callable[[float], float]] = {
    None: lambda x: x,
    "clip": lambda x: max(-1.0, min(1.0, x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "relu": lambda x: max(0.0, x),
    "sigmoid": lambda x: 1 / (1 + math.exp(-max(x, -700))),
    "silu": lambda x: x / (1 + math.exp(-max(x, -700))),
    "tanh": math.tanh,
}


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_element_is_activated_the_same_alone_and_in_any_row(
    ops: Ops, dtype: torch.dtype, activation: ElementActivation | None
) -> None:
    rows = [torch.linspace(-most, most, 37) for most in (1e-3, 2, 8, 90, 3e4)]
    x = torch.stack(rows).to(dtype)
    wanted = [[3 * ACTIVATIONS[activation](one / 1.7) for one in row] for row in x.tolist()]
    found = ops.activate(x.clone(), activation, divisor=1.7, factor=3.0)
    coarse = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), torch.tensor(wanted).double(), rtol=coarse, atol=6e-6)
    for row, alone in enumerate(found):
        assert torch.equal(ops.activate(x[row : row + 1].clone(), activation, divisor=1.7, factor=3.0)[0], alone)
    assert ops.activate(torch.full((1, 3), math.nan), activation).isnan().all()


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xielu_has_a_learned_shape_on_each_side(ops: Ops, dtype: torch.dtype) -> None:
    alphas = (torch.tensor([0.7]), torch.tensor([-0.4]))
    above, below = (math.log1p(math.exp(float(alpha))) for alpha in alphas)

    def xielu(x: float) -> float:
        curve = above * x * x if x > 0 else (0.5 + below) * (math.expm1(min(x, -1e-6)) - x)
        return curve + 0.5 * x

    x = torch.stack([torch.linspace(-most, most, 37) for most in (1e-3, 2, 8, 90)]).to(dtype)
    found = ops.activate(x.clone(), "xielu", alphas=alphas)
    wanted = torch.tensor([[xielu(one) for one in row] for row in x.tolist()], dtype=torch.float64)
    coarse = 1e-6 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(found.double(), wanted, rtol=coarse, atol=6e-6)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_columns_are_converted_to_the_type_of_their_place(ops: Ops, dtype: torch.dtype) -> None:
    x = torch.randn(5, 45)
    narrow = torch.zeros(5, 50, dtype=dtype)
    ops.copy_columns(x, narrow, Columns(first=3, to=4, count=19, heads=2, step=20, to_step=25))
    assert torch.equal(narrow[:, 4:23], x[:, 3:22].to(dtype))
    assert torch.equal(narrow[:, 29:48], x[:, 23:42].to(dtype))
    assert not narrow[:, :4].any()
    assert not narrow[:, 23:29].any()
    wide = torch.zeros(5, 19)
    ops.copy_columns(narrow, wide, Columns(4, 0, 19))
    assert torch.equal(wide, x[:, 3:22].to(dtype).float())


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 500)], ids=str)
def test_rows_are_scaled_as_by_torch(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    assert torch.equal(ops.activate(x.clone(), None, factor=12.3), x * 12.3)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("paired", [False, True])
def test_columns_of_heads_go_where_they_are_told(ops: Ops, dtype: torch.dtype, paired: bool) -> None:
    x = torch.randn(5, 40).to(dtype)
    out = torch.full((5, 50), 7.0, dtype=dtype)
    ops.copy_columns(x, out, Columns(first=3, to=4, count=6, heads=3, step=11, to_step=15, paired=paired))
    expected = torch.full((5, 50), 7.0, dtype=dtype)
    order = [0, 2, 4, 1, 3, 5] if paired else range(6)
    for head in range(3):
        for to, column in enumerate(order):
            expected[:, 4 + 15 * head + to] = x[:, 3 + 11 * head + column]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 500)], ids=str)
def test_rows_are_added_and_rounded_once(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    wanted = (residual.double() + 0.3 * x.double()).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(ops.add_rows(x, residual.clone(), 0.3), wanted, atol=tolerance, rtol=tolerance)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "head_dim", "more"), [(1, 4, 0), (3, 20, 40), (4, 64, 128)])
def test_heads_are_gated_as_by_the_reference_and_each_row_as_alone(
    dtype: torch.dtype, heads: int, head_dim: int, more: int
) -> None:
    x = torch.randn(70, heads * head_dim).to(dtype)
    query = (4 * torch.randn(70, 2 * heads * head_dim + more)).to(dtype)
    got = native_table().head_gates(x.clone(), query, heads)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got, REFERENCE.head_gates(x.clone(), query, heads), atol=tolerance, rtol=tolerance)
    alone = [native_table().head_gates(x[row : row + 1].clone(), query[row : row + 1], heads) for row in range(70)]
    assert torch.equal(got, torch.cat(alone))
    assert float((query[:, head_dim] - query[:, 0]).abs().max()) > 0  # a gate is not its query


def mixed(ops: Ops, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return ops.mix_streams(x, factors, 3, 2, 37, scale=torch.linspace(-1, 1, 37))


ROW_WISE: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "streams are mixed": (
        mixed,
        lambda x, by: (
            torch.einsum("rjc,rij->ric", x[:, :111].view(-1, 3, 37), by[:, :6].view(-1, 2, 3))
            * torch.linspace(-1, 1, 37).double()
        ),
    ),
    "magnitudes are matched": (
        lambda ops, x, by: ops.match_magnitude(x.clone(), by.to(x.dtype), 0.01),
        lambda x, by: (
            x
            / x.square().mean(1, keepdim=True).clamp(min=0.01).sqrt()
            * by[:, : x.shape[1]].square().mean(1, keepdim=True).sqrt()
        ),
    ),
    "those far above the mean are kept": (
        lambda ops, x, by: ops.keep_above(x.clone(), 0.7),
        lambda x, by: (x - x.mean(1, keepdim=True) - 0.7 * x.std(1, keepdim=True, correction=0)).relu(),
    ),
}


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROW_WISE)
def test_operations_of_gemma3n_are_what_they_say_and_each_row_as_alone(ops: Ops, dtype: torch.dtype, name: str) -> None:
    compute, define = ROW_WISE[name]
    x, by = torch.randn(20, 115).to(dtype), torch.randn(20, 120)
    x[3] *= 1e-3  # below the least magnitude
    by = by if name == "streams are mixed" else by.to(dtype).float()
    wanted = define(x.double(), by.double()).flatten(1)
    found = compute(ops, x, by)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    if ops is not REFERENCE:
        alone = [compute(ops, x[row : row + 1], by[row : row + 1]) for row in range(20)]
        assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("ops", VERSIONS)
def test_the_gate_of_a_head_is_what_lies_behind_it(ops: Ops) -> None:
    x, query = torch.ones(2, 6), torch.zeros(2, 14)
    query[:, 3:6], query[:, 9:12] = 100.0, -100.0
    gated = ops.head_gates(x, query, 2)
    assert gated[:, :3].tolist() == [[1.0] * 3] * 2
    assert float(gated[:, 3:].max()) < 1e-37


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", GATES)
def test_rows_are_multiplied_by_columns_of_others_after_their_activation(
    ops: Ops, dtype: torch.dtype, activation: Activation
) -> None:
    x, others = torch.randn(9, 19).to(dtype), torch.randn(9, 60).to(dtype)
    wanted = activate_gated(torch.cat([x, others[:, 30:49]], -1).float(), activation).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    gated = ops.gate(x.clone(), others, 30, activation)
    torch.testing.assert_close(gated, wanted, atol=tolerance, rtol=tolerance)
    if ops is not REFERENCE:  # where torch computes the end of a vector otherwise
        alone = [ops.gate(x[row : row + 1].clone(), others[row : row + 1], 30, activation) for row in range(9)]
        assert torch.equal(gated, torch.cat(alone))
