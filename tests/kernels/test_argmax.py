"""The likeliest token: both versions on the same rows."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock import native
from penstock.kernels.argmax import native as native_argmax
from penstock.kernels.argmax import reference

VERSIONS = [
    reference.argmax,
    pytest.param(native_argmax.argmax, marks=pytest.mark.skipif(native.library() is None, reason="not built")),
]


@pytest.mark.parametrize("version", VERSIONS)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=70))
def test_it_is_the_first_of_the_largest(version: Callable[[Tensor], Tensor], row: list[int]) -> None:
    logits = torch.tensor([row, row[::-1], [-40 - x for x in row]], dtype=torch.float32)
    assert version(logits).tolist() == [list(x).index(max(x)) for x in logits.tolist()]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [1, 5, 16, 50])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_a_logit_that_is_no_number_has_none(
    version: Callable[[Tensor], Tensor], size: int, bad: float
) -> None:
    for place in {0, size // 2, size - 1}:
        logits = torch.randn(3, size)
        logits[1, place] = bad
        tokens = version(logits).tolist()
        assert tokens[1] == -1
        assert tokens[0] == int(logits[0].argmax())


@pytest.mark.parametrize("version", VERSIONS)
def test_banned_tokens_are_never_chosen_and_there_may_be_nothing_left(version: Callable[[Tensor], Tensor]) -> None:
    logits = torch.full((2, 19), -math.inf)
    logits[0, 17] = -1e30
    assert version(logits).tolist() == [17, -1]
