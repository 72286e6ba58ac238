"""What log-probabilities are made of: both versions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock import native
from penstock.kernels.draw.reference import SCALE
from penstock.kernels.leading import native as native_leading
from penstock.kernels.leading import reference

Leading = Callable[..., Any]
VERSIONS = [
    reference.leading,
    pytest.param(native_leading.leading, marks=pytest.mark.skipif(native.library() is None, reason="not built")),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (7, 7), (33, 5), (1000, 20), (5003, 300)])
def test_the_likeliest_stand_in_an_order_that_equal_logits_do_not_upset(version: Leading, vocab: int, k: int) -> None:
    logits = torch.randint(-3, 4, (20, vocab), generator=torch.Generator().manual_seed(3)).float()
    logits[3, vocab // 2 :] = -math.inf
    logits[3, 0] = 1.0
    top, _, values, tokens = version(logits, k)
    expected, expected_tokens = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(top, expected[:, 0])
    assert torch.equal(values, expected[:, :k])
    assert torch.equal(tokens, expected_tokens[:, :k])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_total_is_that_of_the_softmax(version: Leading) -> None:
    logits = torch.randn(9, 4099, generator=torch.Generator().manual_seed(4)) * 3
    top, total, values, tokens = version(logits, 0)
    assert values.shape == tokens.shape == (9, 0)
    norm = top.double() + (total.double() / SCALE).log()
    assert (norm - logits.double().logsumexp(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_by_its_largest(version: Leading, bad: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    logits[1] = bad
    top, *_ = version(logits, 4)
    assert top.isfinite().tolist() == [True, False, True]
