"""From logits to tokens: every version, and `transformers` beside them."""

import itertools
import math
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

from penstock.kernels.ops import Ops
from penstock.kernels.sampling import SCALE, Controls
from penstock.kernels.sampling.reference import invert, kept_weights, token_weights
from tests.kernels.versions import REFERENCE, VERSIONS

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


def table(rows: int, controls: tuple[float, ...], uniform: Any = 0.5) -> Controls:
    return Controls(*np.tile(np.float64(controls), (rows, 1)).T, np.broadcast_to(uniform, rows))


def weighed_distribution(logits: Tensor, controls: tuple[float, ...]) -> Tensor:
    """What the reference draws from."""
    weights = kept_weights(logits, torch.from_numpy(np.stack(table(len(logits), controls), 1))).double()
    return (weights / weights.sum(-1, keepdim=True)).float()


def drawn_distribution(ops: Ops, logits: Tensor, controls: tuple[float, ...], draws: int) -> Tensor:
    """What a version draws from, by random numbers at even distances: exact to 1 / `draws`."""
    tokens = ops.sample(logits.expand(draws, -1).contiguous(), table(draws, controls, (np.arange(draws) + 0.5) / draws))
    return torch.bincount(torch.from_numpy(tokens), minlength=logits.shape[-1]).float() / draws


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


@pytest.mark.parametrize("ops", VERSIONS)
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
def test_tokens_are_drawn_from_that_distribution(ops: Ops, controls: tuple[float, ...]) -> None:
    logits = torch.randn(1, 41, generator=torch.Generator().manual_seed(2)) * 2
    found = drawn_distribution(ops, logits, controls, draws=2**17)
    assert (found - expected_distribution(logits, *controls)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("ops", VERSIONS[1:])
@pytest.mark.parametrize("vocab", [1, 5, 16, 1021, 5003])
@pytest.mark.parametrize("spread", [0.3, 4.0, 30.0])
def test_the_kernel_draws_what_the_reference_draws(ops: Ops, vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    every = itertools.product((0.0, 0.5, 1.7), (0, 1, 30, 3000), (1.0, 0.3, 0.999), (0.0, 0.05), (1.0, 0.6))
    rows = np.array([(*row, torch.rand((), generator=generator)) for row in every], dtype=np.float64)
    controls = Controls(*rows.T)
    logits = torch.randn(len(rows), vocab, generator=generator) * spread
    logits[::5] = logits[::5].round()  # many equal ones
    logits[::7, ::3] = -math.inf
    assert ops.sample(logits, controls).tolist() == REFERENCE.sample(logits, controls).tolist()


VALUES = st.lists(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.0000002, -math.inf]), min_size=1, max_size=60)


@pytest.mark.parametrize("ops", VERSIONS[1:])
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
    ops: Ops, values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    logits = torch.tensor([[*values, 0.0]]).expand(16, -1).contiguous()
    # no control ends exactly between two tokens
    uniform = (np.arange(16) + 0.4831) / 16
    controls = table(16, (temperature, top_k, top_p, min_p, typical_p), uniform)
    assert ops.sample(logits, controls).tolist() == REFERENCE.sample(logits, controls).tolist()


@pytest.mark.parametrize("ops", VERSIONS)
def test_tokens_as_likely_as_the_kth_all_stay(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    found = drawn_distribution(ops, logits, (1.0, 2, 1.0, 0.0, 1.0), 500)
    assert (found > 0).tolist() == [False, True, True, True, False, True]


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("vocab", [8, 40, 600])
def test_of_equally_likely_tokens_at_the_edge_of_the_nucleus_the_first_stay(ops: Ops, vocab: int) -> None:
    found = drawn_distribution(ops, torch.zeros(1, vocab), (1.0, 0, 0.5, 0.0, 1.0), 4 * vocab)
    assert (found > 0).tolist() == [True] * (vocab // 2) + [False] * (vocab // 2)


@pytest.mark.parametrize("ops", VERSIONS)
def test_typical_tokens_need_not_be_likely_ones(ops: Ops) -> None:
    logits = torch.tensor([0.4, *[0.06] * 10]).log()[None]  # the mean information is nearer to that of the ten
    found = drawn_distribution(ops, logits, (1.0, 0, 1.0, 0.0, 0.3), 1000)
    expected = expected_distribution(logits, 1.0, 0, 1.0, 0.0, 0.3)[0]
    assert expected[0] == 0
    assert (found - expected).abs().max() < 2e-3


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("controls", [(0.0, 0, 1.0, 0.0, 1.0), NEUTRAL, (1.0, 3, 0.5, 0.1, 0.9), (1e-30, 0, 1, 0, 1)])
def test_a_row_that_is_not_finite_has_no_token(ops: Ops, controls: tuple[float, ...]) -> None:
    logits = torch.randn(9, 100, generator=torch.Generator().manual_seed(3))
    expected = ops.sample(logits, table(9, controls))
    logits[1, 99], logits[4, 0], logits[6], logits[7, 50] = math.nan, math.inf, -math.inf, -math.inf
    expected[[1, 4, 6]] = -1
    found = ops.sample(logits, table(9, controls))
    assert found[[0, 1, 2, 3, 4, 5, 6, 8]].tolist() == expected[[0, 1, 2, 3, 4, 5, 6, 8]].tolist()
    assert found[7] >= 0


@pytest.mark.parametrize("ops", VERSIONS)
def test_a_vocabulary_of_equal_logits_is_drawn_from_evenly(ops: Ops) -> None:
    for controls in (NEUTRAL, (1.0, 50, 1.0, 0.0, 1.0), (1.0, 0, 1.0, 1.0, 1.0), (1.0, 0, 1.0, 0.0, 0.2)):
        found = drawn_distribution(ops, torch.full((1, 300), 7.0), controls, 3000)
        assert (found * 300 - 1).abs().max() < 1e-5


@pytest.mark.parametrize("ops", VERSIONS)
def test_a_random_number_at_the_end_of_its_range_takes_the_last_token(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -100.0]])
    assert ops.sample(logits, table(1, NEUTRAL, 1 - 2**-53)).tolist() == [2]
    assert ops.sample(logits, table(1, NEUTRAL, 0.0)).tolist() == [0]


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


@pytest.mark.parametrize("ops", VERSIONS)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=70))
def test_the_greedy_token_is_the_first_of_the_largest(ops: Ops, row: list[int]) -> None:
    logits = torch.tensor([row, row[::-1], [-40 - x for x in row]], dtype=torch.float32)
    assert ops.argmax(logits).tolist() == [list(x).index(max(x)) for x in logits.tolist()]


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("size", [1, 5, 16, 50])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_a_logit_that_is_nan_or_infinite_has_no_greedy_token(ops: Ops, size: int, bad: float) -> None:
    for place in {0, size // 2, size - 1}:
        logits = torch.randn(3, size)
        logits[1, place] = bad
        tokens = ops.argmax(logits).tolist()
        assert tokens[1] == -1
        assert tokens[0] == int(logits[0].argmax())


@pytest.mark.parametrize("ops", VERSIONS)
def test_banned_tokens_are_never_chosen_and_there_may_be_nothing_left(ops: Ops) -> None:
    logits = torch.full((2, 19), -math.inf)
    logits[0, 17] = -1e30
    assert ops.argmax(logits).tolist() == [17, -1]


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (7, 7), (33, 5), (1000, 20), (5003, 300)])
def test_the_likeliest_stand_in_an_order_that_equal_logits_do_not_upset(ops: Ops, vocab: int, k: int) -> None:
    logits = torch.randint(-3, 4, (20, vocab), generator=torch.Generator().manual_seed(3)).float()
    logits[3, vocab // 2 :] = -math.inf
    logits[3, 0] = 1.0
    top, _, values, tokens = map(torch.from_numpy, ops.topk_logprobs(logits, k))
    expected, expected_tokens = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(top, expected[:, 0])
    assert torch.equal(values, expected[:, :k])
    assert torch.equal(tokens, expected_tokens[:, :k])


@pytest.mark.parametrize("ops", VERSIONS)
def test_the_total_is_that_of_the_softmax(ops: Ops) -> None:
    logits = torch.randn(9, 4099, generator=torch.Generator().manual_seed(4)) * 3
    top, total, values, tokens = map(torch.from_numpy, ops.topk_logprobs(logits, 0))
    assert values.shape == tokens.shape == (9, 0)
    norm = top.double() + (total.double() / SCALE).log()
    assert (norm - logits.double().logsumexp(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_by_its_largest(ops: Ops, bad: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    logits[1] = bad
    top, *_ = ops.topk_logprobs(logits, 4)
    assert np.isfinite(top).tolist() == [True, False, True]


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1021])
def test_what_is_not_allowed_is_minus_infinity_and_the_rest_as_it_was(ops: Ops, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    allowed = random.random((3, -(-vocab // 32) * 32)) < np.array([[0.5], [0.0], [1.0]])
    bits = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    expected = logits.clone()
    rows = np.array([1, 4, 3])
    for row, some in zip(rows, allowed, strict=True):
        expected[row, torch.from_numpy(~some[:vocab])] = -torch.inf
    ops.apply_bitmask(logits, rows, bits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("ops", VERSIONS)
def test_a_mask_of_another_width_is_a_mistake(ops: Ops) -> None:
    with pytest.raises(AssertionError, match="wide"):
        ops.apply_bitmask(torch.zeros(1, 64), np.array([0]), np.zeros((1, 3), np.int32))
