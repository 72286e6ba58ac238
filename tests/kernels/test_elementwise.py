"""The kernels that work on each token alone, against formulations of one element at a time."""

import math

import pytest
import torch

from penstock import native
from penstock.kernels.gather import gather
from penstock.kernels.rms_norm import add_rms_norm, reference, rms_norm
from penstock.kernels.rotary import apply_rotary
from penstock.kernels.scale import scale
from penstock.kernels.silu_mul import silu_mul

SHAPES = [(1, 1), (1, 7), (3, 16), (17, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_divides_by_the_root_mean_square(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64).float(), torch.randn(shape[1])
    for row, normed in zip(x.tolist(), rms_norm(x, weight, 1e-3), strict=True):
        rms = math.sqrt(sum(v * v for v in row) / len(row) + 1e-3)
        torch.testing.assert_close(normed, torch.tensor(row) / rms * weight, atol=1e-5, rtol=1e-5)


def test_rms_norm_of_heads_leaves_a_fused_projection_alone() -> None:
    fused, weight = torch.randn(3, 6, 8), torch.randn(8)
    before = fused.clone()
    normed = rms_norm(fused[:, 1:3], weight, 1e-6)
    torch.testing.assert_close(normed[2, 1], rms_norm(before[2, 2].unsqueeze(0), weight, 1e-6)[0])
    assert torch.equal(fused, before)


def test_the_norm_of_tiny_and_huge_half_precision_numbers_is_taken_in_float32() -> None:
    x = torch.tensor([[1e-3, 2e-3], [3e4, 4e4]], dtype=torch.float16)
    normed = rms_norm(x, torch.ones(2, dtype=torch.float16), 0.0).float()
    torch.testing.assert_close(normed, torch.tensor([[0.6325, 1.2649], [0.8485, 1.1314]]), atol=2e-3, rtol=0)


def test_add_rms_norm_returns_the_sum_and_its_norm() -> None:
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    expected = x + residual
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, 1e-6))


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 1024), (300, 100)], ids=str)
def test_native_norms_match_the_reference_and_each_row_is_as_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = (torch.rand(shape[1]) + 0.5).to(dtype)
    tolerance = {"atol": 1e-6 if dtype == torch.float32 else 0.02, "rtol": 1e-5 if dtype == torch.float32 else 0.01}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **tolerance)
    wanted = reference.add_rms_norm(x, residual, weight, 1e-5)
    alone = [
        add_rms_norm(a.clone(), b.clone(), weight, 1e-5) for a, b in zip(x[:, None], residual[:, None], strict=True)
    ]
    together = add_rms_norm(x, residual, weight, 1e-5)
    for index, (got, expected) in enumerate(zip(together, wanted, strict=True)):
        torch.testing.assert_close(got, expected, **tolerance)
        assert torch.equal(got, torch.cat([row[index] for row in alone]))


@pytest.mark.parametrize(("head_dim", "angles"), [(2, 1), (8, 4), (10, 3)])
def test_rotary_turns_each_pair_by_its_angle(head_dim: int, angles: int) -> None:
    x, phases = torch.randn(3, 2, head_dim), torch.randn(3, angles)
    wanted = x.clone()
    for token in range(3):
        for head in range(2):
            for pair in range(angles):
                turned = complex(x[token, head, pair], x[token, head, pair + angles]) * complex(
                    math.cos(phases[token, pair]), math.sin(phases[token, pair])
                )
                wanted[token, head, pair], wanted[token, head, pair + angles] = turned.real, turned.imag
    apply_rotary(x, phases.cos(), phases.sin())
    torch.testing.assert_close(x, wanted, atol=1e-6, rtol=1e-5)


def test_rotary_works_in_place_on_some_heads_of_a_fused_projection() -> None:
    fused = torch.randn(2, 5, 4)
    before = fused.clone()
    apply_rotary(fused[:, :3], torch.zeros(2, 2), torch.ones(2, 2))
    assert torch.equal(fused[:, :3], torch.cat([-before[:, :3, 2:], before[:, :3, :2]], dim=-1))
    assert torch.equal(fused[:, 3:], before[:, 3:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul_gates_the_second_half_by_the_first(shape: tuple[int, int]) -> None:
    gate, up = torch.randn(shape), torch.randn(shape)
    wanted = torch.tensor(
        [
            [g / (1 + math.exp(-g)) * u for g, u in zip(*rows, strict=True)]
            for rows in zip(gate.tolist(), up.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(silu_mul(torch.cat([gate, up], -1)), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 5), (33,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_gathered_in_any_order_and_repeated(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = (100 * torch.randn(70, *shape)).to(dtype)
    for ids in ([], [69], [3, 0, 3, 68], [*range(70)] * 40):
        row_ids = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(gather(table, row_ids), table[row_ids])
    assert torch.equal(gather(table[::2], torch.tensor([1])), table[[2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 500)], ids=str)
def test_rows_are_scaled_as_by_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    assert torch.equal(scale(x.clone(), 12.3), x * 12.3)
