"""RMS normalisation, against a formulation of one element at a time."""

import math

import pytest
import torch
from torch.nn.functional import layer_norm

from penstock.kernels.elementwise import NormWeight
from penstock.kernels.elementwise.reference import rms_norm as reference_norm
from penstock.kernels.ops import Ops
from tests.kernels.versions import REFERENCE, VERSIONS, native_table, needs_native

SHAPES = [(1, 1), (1, 7), (3, 16), (17, 33)]


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_divides_by_the_root_mean_square(ops: Ops, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64).float(), torch.randn(shape[1])
    for row, normed in zip(x.tolist(), ops.rms_norm(x, weight, 1e-3), strict=True):
        rms = math.sqrt(sum(v * v for v in row) / len(row) + 1e-3)
        torch.testing.assert_close(normed, torch.tensor(row) / rms * weight, atol=1e-5, rtol=1e-5)


def test_rms_norm_of_heads_leaves_a_fused_projection_alone() -> None:
    fused, weight = torch.randn(3, 6, 8), torch.randn(8)
    before = fused.clone()
    normed = reference_norm(fused[:, 1:3], weight, 1e-6)
    torch.testing.assert_close(normed[2, 1], reference_norm(before[2, 2].unsqueeze(0), weight, 1e-6)[0])
    assert torch.equal(fused, before)


@pytest.mark.parametrize("ops", VERSIONS)
def test_the_norm_of_tiny_and_huge_half_precision_numbers_is_taken_in_float32(ops: Ops) -> None:
    x = torch.tensor([[1e-3, 2e-3], [3e4, 4e4]], dtype=torch.float16)
    normed = ops.rms_norm(x, torch.ones(2, dtype=torch.float16), 0.0).float()
    torch.testing.assert_close(normed, torch.tensor([[0.6325, 1.2649], [0.8485, 1.1314]]), atol=2e-3, rtol=0)


@pytest.mark.parametrize("ops", VERSIONS)
def test_add_rms_norm_returns_the_sum_and_its_norm(ops: Ops) -> None:
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    expected = x + residual
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    assert torch.equal(total, expected)
    assert torch.equal(normed, ops.rms_norm(expected, weight, 1e-6))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 1024), (300, 100)], ids=str)
def test_native_norms_match_the_reference_and_each_row_is_as_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = (torch.rand(shape[1]) + 0.5).to(dtype)
    ops = native_table()
    tolerance = {"atol": 1e-6 if dtype == torch.float32 else 0.02, "rtol": 1e-5 if dtype == torch.float32 else 0.01}
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), **tolerance)
    wanted = REFERENCE.add_rms_norm(x, residual, weight, 1e-5, 1.0)
    alone = [
        ops.add_rms_norm(a.clone(), b.clone(), weight, 1e-5, 1.0)
        for a, b in zip(x[:, None], residual[:, None], strict=True)
    ]
    together = ops.add_rms_norm(x, residual, weight, 1e-5, 1.0)
    for index, (got, expected) in enumerate(zip(together, wanted, strict=True)):
        torch.testing.assert_close(got, expected, **tolerance)
        assert torch.equal(got, torch.cat([row[index] for row in alone]))


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_normalised_in_place_and_no_others(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 50).to(dtype), (torch.rand(17) + 0.5).to(dtype)
    before = x.clone()
    ops.rms_norm_columns(x, 20, weight, 1e-5)
    wanted = ops.rms_norm(before[:, 20:37].contiguous(), weight, 1e-5)
    assert torch.equal(x[:, 20:37], wanted)
    assert torch.equal(x[:, :20], before[:, :20])
    assert torch.equal(x[:, 37:], before[:, 37:])


@pytest.mark.parametrize("ops", VERSIONS)
def test_a_weight_in_float32_is_not_rounded_to_the_type_of_the_activations(ops: Ops) -> None:
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    weight = torch.full((8,), 1.0 + 2**-9)  # in bfloat16 it is 1
    total = ops.rms_norm(x * 3, weight, 0.0).float() + ops.add_rms_norm(x, x * 2, weight, 0.0, 1.0)[0].float()
    assert total.tolist() == [[2.0] * 8]
    weight = torch.full((8,), 1.0 + 2**-8 + 2**-10)
    assert ops.rms_norm(x, weight, 0.0).tolist() == [[1.0078125] * 8]


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 300)], ids=str)
def test_with_a_bias_the_mean_is_taken_off_first(ops: Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = (3 * torch.randn(shape) + 5).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = (torch.rand(shape[1]) + 0.5).to(dtype), torch.randn(shape[1]).to(dtype)

    def wanted(values: torch.Tensor) -> torch.Tensor:
        return layer_norm(values.double(), shape[1:], weight.double(), bias.double(), 1e-3).to(dtype)

    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-3, bias=bias), wanted(x), **tolerance)
    normed, total = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-3, 0.5, bias=bias)
    torch.testing.assert_close(normed, wanted(total), **tolerance)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_columns_are_normalised_each_by_itself(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 4 * 19).to(dtype), torch.rand(19) + 0.5
    wanted = torch.cat([ops.rms_norm(part.contiguous(), weight, 1e-5) for part in x.split(19, 1)], 1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5, groups=4), wanted)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 300)], ids=str)
def test_what_is_added_may_be_normalised_before_and_the_sum_multiplied_after(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[1]) + 0.5
    after, total = NormWeight((torch.rand(shape[1]) + 0.5).to(dtype), 1e-2), torch.tensor([1.7])
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-2)
    wanted = (1.7 * (residual.double() + 0.5 * x.double() * scale * after.weight.double())).to(dtype)
    normed, stream = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, 0.5, after=after, total=total)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close(stream, wanted, **tolerance)
    torch.testing.assert_close(normed, ops.rms_norm(stream, weight, 1e-5))
    added = ops.add_rows(ops.rms_norm(x, after.weight, 1e-2), residual.clone(), 0.5, total=total)
    torch.testing.assert_close(added, wanted, **tolerance)
