"""What the controls leave of a distribution, and draws from it: both versions, and `transformers` beside them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from penstock import native
from penstock.kernels.draw import native as native_draw
from penstock.kernels.draw import reference
from penstock.kernels.draw.reference import SCALE, invert, kept_weights, token_weights

Draw = Callable[[Tensor, Any], Tensor]
VERSIONS = [
    reference.draw,
    pytest.param(native_draw.draw, marks=pytest.mark.skipif(native.library() is None, reason="not built")),
]
NEUTRAL = (1.0, 0, 1.0, 0.0, 1.0)  # temperature, top_k, top_p, min_p, typical_p


def expected_distribution(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> Tensor:
    """What `transformers` would draw from: its warpers in the order of its `generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if typical_p < 1:
        warpers.append(TypicalLogitsWarper(typical_p))
    return torch.as_tensor(warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits)).softmax(-1)


def table(rows: int, controls: tuple[float, ...], uniform: Any = 0.5) -> Any:
    return np.column_stack([np.tile(np.float64(controls), (rows, 1)), np.broadcast_to(uniform, rows)])


def weighed_distribution(logits: Tensor, controls: tuple[float, ...]) -> Tensor:
    """What the reference draws from."""
    weights = kept_weights(logits, torch.from_numpy(table(len(logits), controls))).double()
    return (weights / weights.sum(-1, keepdim=True)).float()


def drawn_distribution(draw: Draw, logits: Tensor, controls: tuple[float, ...], draws: int) -> Tensor:
    """What a version draws from, by random numbers at even distances: exact to 1 / `draws`."""
    tokens = draw(logits.expand(draws, -1).contiguous(), table(draws, controls, (np.arange(draws) + 0.5) / draws))
    return torch.bincount(tokens, minlength=logits.shape[-1]).float() / draws


@pytest.mark.parametrize("typical_p", [1.0, 0.9, 0.2])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("top_p", [0.02, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 400])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_controls_leave_the_distribution_that_transformers_leaves(
    temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    logits = torch.randn(4, 1021, generator=torch.Generator().manual_seed(1)) * 4
    controls = (temperature, top_k, top_p, min_p, typical_p)
    assert (weighed_distribution(logits, controls) - expected_distribution(logits, *controls)).abs().max() < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "controls",
    [
        (0.7, 0, 1.0, 0.0, 1.0),
        (1.0, 7, 1.0, 0.0, 1.0),
        (1.3, 0, 0.8, 0.0, 1.0),
        (1.0, 0, 1.0, 0.1, 1.0),
        (1.0, 0, 1.0, 0.0, 0.7),
        (0.9, 20, 0.9, 0.01, 0.8),
    ],
)
def test_tokens_are_drawn_from_that_distribution(version: Draw, controls: tuple[float, ...]) -> None:
    logits = torch.randn(1, 41, generator=torch.Generator().manual_seed(2)) * 2
    found = drawn_distribution(version, logits, controls, draws=2**17)
    assert (found - expected_distribution(logits, *controls)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("version", VERSIONS[1:])
@pytest.mark.parametrize("vocab", [1, 5, 16, 1021, 5003])
@pytest.mark.parametrize("spread", [0.3, 4.0, 30.0])
def test_the_kernel_draws_what_the_reference_draws(version: Draw, vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    every = itertools.product((0.0, 0.5, 1.7), (0, 1, 30, 3000), (1.0, 0.3, 0.999), (0.0, 0.05), (1.0, 0.6))
    controls = np.array([(*row, torch.rand((), generator=generator)) for row in every], dtype=np.float64)
    logits = torch.randn(len(controls), vocab, generator=generator) * spread
    logits[::5] = logits[::5].round()  # many equal ones
    logits[::7, ::3] = -math.inf
    assert version(logits, controls).tolist() == reference.draw(logits, controls).tolist()


VALUES = st.lists(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.0000002, -math.inf]), min_size=1, max_size=60)


@pytest.mark.parametrize("version", VERSIONS[1:])
@settings(max_examples=200, deadline=None)
@given(
    values=VALUES,
    temperature=st.sampled_from([1e-30, 0.8, 100.0]),
    top_k=st.integers(0, 70),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    typical_p=st.floats(1e-6, 1.0),
)
def test_the_kernel_draws_what_the_reference_draws_where_many_logits_are_equal(
    version: Draw, values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    logits = torch.tensor([[*values, 0.0]]).expand(16, -1).contiguous()
    # no control ends exactly between two tokens
    uniform = (np.arange(16) + 0.4831) / 16
    controls = table(16, (temperature, top_k, top_p, min_p, typical_p), uniform)
    assert version(logits, controls).tolist() == reference.draw(logits, controls).tolist()


@pytest.mark.parametrize("version", VERSIONS)
def test_tokens_as_likely_as_the_kth_all_stay(version: Draw) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    found = drawn_distribution(version, logits, (1.0, 2, 1.0, 0.0, 1.0), 500)
    assert (found > 0).tolist() == [False, True, True, True, False, True]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("vocab", [8, 40, 600])
def test_of_equally_likely_tokens_at_the_edge_of_the_nucleus_the_first_stay(version: Draw, vocab: int) -> None:
    found = drawn_distribution(version, torch.zeros(1, vocab), (1.0, 0, 0.5, 0.0, 1.0), 4 * vocab)
    assert (found > 0).tolist() == [True] * (vocab // 2) + [False] * (vocab // 2)


@pytest.mark.parametrize("version", VERSIONS)
def test_typical_tokens_need_not_be_likely_ones(version: Draw) -> None:
    logits = torch.tensor([0.4, *[0.06] * 10]).log()[None]  # the mean information is nearer to that of the ten
    found = drawn_distribution(version, logits, (1.0, 0, 1.0, 0.0, 0.3), 1000)
    expected = expected_distribution(logits, 1.0, 0, 1.0, 0.0, 0.3)[0]
    assert expected[0] == 0
    assert (found - expected).abs().max() < 2e-3


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("controls", [(0.0, 0, 1.0, 0.0, 1.0), NEUTRAL, (1.0, 3, 0.5, 0.1, 0.9), (1e-30, 0, 1, 0, 1)])
def test_a_row_that_is_not_finite_has_no_token(version: Draw, controls: tuple[float, ...]) -> None:
    logits = torch.randn(9, 100, generator=torch.Generator().manual_seed(3))
    expected = version(logits, table(9, controls))
    logits[1, 99], logits[4, 0], logits[6], logits[7, 50] = math.nan, math.inf, -math.inf, -math.inf
    expected[[1, 4, 6]] = -1
    found = version(logits, table(9, controls))
    assert found[[0, 1, 2, 3, 4, 5, 6, 8]].tolist() == expected[[0, 1, 2, 3, 4, 5, 6, 8]].tolist()
    assert found[7] >= 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_vocabulary_of_equal_logits_is_drawn_from_evenly(version: Draw) -> None:
    for controls in (NEUTRAL, (1.0, 50, 1.0, 0.0, 1.0), (1.0, 0, 1.0, 1.0, 1.0), (1.0, 0, 1.0, 0.0, 0.2)):
        found = drawn_distribution(version, torch.full((1, 300), 7.0), controls, 3000)
        assert (found * 300 - 1).abs().max() < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
def test_a_random_number_at_the_end_of_its_range_takes_the_last_token(version: Draw) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -100.0]])
    assert version(logits, table(1, NEUTRAL, 1 - 2**-53)).tolist() == [2]
    assert version(logits, table(1, NEUTRAL, 0.0)).tolist() == [0]


def test_weights_are_the_softmax_at_a_temperature() -> None:
    logits = torch.randn(5, 4099, generator=torch.Generator().manual_seed(2)) * 3
    weights = token_weights(logits, logits.amax(-1, keepdim=True), torch.full((5, 1), 0.7)).double()
    assert (weights / weights.sum(-1, keepdim=True) - (logits / 0.7).softmax(-1)).abs().max() < 1e-6
    assert weights.max() == SCALE


@pytest.mark.parametrize("width", [1, 5, 128, 129, 1000])
def test_inversion_takes_the_first_token_at_which_the_sum_is_above_the_number(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.randint(0, 4, (200, width), generator=generator)
    weights[:, width // 2] += 1
    uniform = torch.rand(200, 1, dtype=torch.float64, generator=generator)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    targets = (uniform * weights.sum(-1, keepdim=True)).long()
    places = invert(weights, uniform)
    assert torch.equal(places, (weights.cumsum(-1) <= targets).sum(-1))
    assert (weights.gather(1, places[:, None]) > 0).all()


def test_inversion_stays_inside_where_rounding_reaches_the_total() -> None:
    weights = torch.tensor([[2**57 + 1, 2**57 - 2, 0]])
    assert invert(weights, torch.tensor([[1 - 2**-53]], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("vocab", [1, 7, 8, 15, 16, 17, 1021, 4096])
def test_the_bits_of_a_weight_do_not_depend_on_where_its_row_stands(vocab: int) -> None:
    """The reference's foundation: exp is the same function in a vector's body and tail, and in every thread's share."""
    row = torch.linspace(-30, 0, vocab)
    ones = torch.ones(64, 1)
    for rows in (1, 2, 7, 64):
        batch = row.repeat(rows, 1)
        weights = token_weights(batch, batch.amax(-1, keepdim=True), ones[:rows])
        assert torch.equal(weights, token_weights(row[None], row.amax()[None, None], ones[:1]).expand(rows, -1))
