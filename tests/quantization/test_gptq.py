"""Rounding with error feedback: better results than plain rounding where inputs go together; scales that are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.quantization.gptq import Grid, fit_grid, round_with_feedback


def values(q: Tensor, grid: Grid) -> Tensor:
    zero, scale = (part.repeat_interleave(grid.group, 1) for part in (grid.zero, grid.scale))
    return (q.float() - zero) * scale


def rounded_plainly(weight: Tensor, grid: Grid) -> Tensor:
    return torch.stack([grid.round(weight[:, column], column) for column in range(weight.shape[1])], 1)


def inputs(count: int, columns: int, seed: int = 0) -> Tensor:
    """That go together: all are mixtures of a few."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(count, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=generator
    )
    return few + 0.3 * torch.randn(count, columns, generator=generator)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (6, True)])
def test_feedback_lessens_the_error_of_the_results(bits: int, symmetric: bool) -> None:
    weight, x = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)), inputs(500, 96)
    gram = x.T @ x
    grid = fit_grid(weight, gram.diagonal(), bits, 32, symmetric=symmetric)
    exact = x @ weight.T
    plain = (x @ values(rounded_plainly(weight, grid), grid).T - exact).square().sum()
    ours = (x @ values(round_with_feedback(weight, gram, grid), grid).T - exact).square().sum()
    assert ours < 0.6 * plain


def test_without_inputs_it_is_plain_rounding() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    grid = fit_grid(weight, torch.ones(64), 4, 32, symmetric=False)
    made = round_with_feedback(weight, torch.zeros(64, 64), grid)
    assert torch.equal(made.float(), rounded_plainly(weight, grid))


def test_inputs_that_are_always_zero_are_no_obstacle() -> None:
    weight, x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)), inputs(50, 64)
    x[:, 5] = 0
    gram = x.T @ x
    grid = fit_grid(weight, gram.diagonal(), 4, 32, symmetric=False)
    assert (values(round_with_feedback(weight, gram, grid), grid) - weight).abs().max() < 3


@given(
    seed=st.integers(0, 2**31),
    magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 100.0]),
    bits=st.sampled_from([(4, False), (6, True)]),
)
@settings(max_examples=40, deadline=None)
def test_scales_are_exact_in_bfloat16_and_float16_and_multiples_of_a_power_of_two_a_row(
    seed: int, magnitude: float, bits: tuple[int, bool]
) -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed)) * magnitude
    grid = fit_grid(weight, torch.ones(96), bits[0], 32, symmetric=bits[1])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(grid.scale.to(dtype).float(), grid.scale)
    _, exponent = torch.frexp(grid.scale.amax(1, keepdim=True))
    multiples = grid.scale / torch.exp2((exponent - 8).float())
    assert torch.equal(multiples, multiples.round())
    assert multiples.max() <= 255
    assert grid.zero.min() >= 0
    assert grid.zero.max() <= 2 ** bits[0] - 1
