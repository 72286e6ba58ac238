import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.sampling.weights import SCALE, all_candidates, draw, leading_tokens, likely_candidates, token_weights


def expected_distribution(logits, temperature, top_k, top_p, min_p):
    """What `transformers` would draw from."""
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)


def column(value, rows, dtype=torch.float32):
    return torch.full((rows, 1), value, dtype=dtype)


def found_distribution(logits, temperature, top_k, top_p, min_p, width=None):
    """What we would draw from, and which rows are decided; without a width, by the search of the vocabulary."""
    rows, vocab = logits.shape
    t, m = column(temperature, rows), column(min_p, rows)
    k = column(top_k, rows, torch.int64) if top_k else None
    limits = (t, k, column(top_p, rows, torch.float64), m)
    if width is None:
        weights = all_candidates(logits, *limits).double()
        return (weights / weights.sum(-1, keepdim=True)).float(), torch.ones(rows, dtype=torch.bool)
    found = likely_candidates(logits, *limits, min(width, vocab))
    assert torch.equal(found.token_ids, found.token_ids.sort(-1).values)
    shares = found.weights.double() / found.weights.sum(-1, keepdim=True)
    return torch.zeros(rows, vocab, dtype=torch.float64).scatter_(1, found.token_ids, shares).float(), found.decided


@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 400])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_controls_leave_the_distribution_that_transformers_leaves(temperature, top_k, top_p, min_p):
    logits = torch.randn(6, 1021, generator=torch.Generator().manual_seed(1)) * 4
    expected = expected_distribution(logits, temperature, top_k, top_p, min_p)
    for width in (64, 1021, None):
        found, decided = found_distribution(logits, temperature, top_k, top_p, min_p, width)
        assert decided.all() or width == 64
        assert (found - expected).abs().amax(-1).masked_fill(~decided, 0).max() < 1e-5


def test_weights_of_the_whole_vocabulary_are_the_softmax_at_a_temperature():
    logits = torch.randn(5, 4099, generator=torch.Generator().manual_seed(2)) * 3
    weights = token_weights(logits, logits.amax(-1, keepdim=True), column(0.7, 5), column(0.01, 5)).double()
    expected = expected_distribution(logits, 0.7, 0, 1.0, 0.01)
    assert (weights / weights.sum(-1, keepdim=True) - expected).abs().max() < 1e-6
    assert weights.max() == SCALE


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.0000002, -math.inf]), min_size=2, max_size=60),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    width=st.integers(1, 30),
)
def test_every_search_that_decides_finds_the_same(values, top_k, top_p, min_p, width):
    """With many equal logits, where a search could go wrong."""
    logits = torch.tensor([[*values, 0.0]])
    top_k = top_k if top_k < len(values) else 0
    sorted_, decided = found_distribution(logits, 0.8, top_k, top_p, min_p, logits.shape[-1])
    assert decided.all()
    assert sorted_.max() > 0
    everything, _ = found_distribution(logits, 0.8, top_k, top_p, min_p)
    assert torch.equal(everything, sorted_)
    narrow, decided = found_distribution(logits, 0.8, top_k, top_p, min_p, width)
    if decided.all():
        assert torch.equal(narrow, sorted_)


def test_tokens_as_likely_as_the_kth_all_stay():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    for width in (6, None):
        found, _ = found_distribution(logits, 1.0, 2, 1.0, 0.0, width)
        assert (found > 0).tolist() == [[False, True, True, True, False, True]]


def test_of_equally_likely_tokens_at_the_edge_of_the_nucleus_the_first_stay():
    for width in (8, None):
        found, _ = found_distribution(torch.zeros(1, 8), 1.0, 0, 0.4, 0.0, width)
        assert (found > 0).tolist() == [[True] * 4 + [False] * 4]


def test_leading_tokens_stand_in_an_order_that_equal_logits_do_not_upset():
    logits = torch.randint(-2, 3, (20, 500), generator=torch.Generator().manual_seed(3)).float()
    logits[:, 7] = 9.0
    expected, expected_ids = logits.sort(dim=-1, descending=True, stable=True)
    lead = leading_tokens(logits, 300)
    assert torch.equal(lead.logits, expected[:, :300])
    assert torch.equal(lead.token_ids[lead.certain], expected_ids[:, :300][lead.certain])
    assert lead.certain[:, 0].all()
    assert not lead.certain[:, -1].any()


@pytest.mark.parametrize("width", [1, 5, 128, 129, 1000])
def test_a_draw_inverts_the_cumulated_weights(width):
    generator = torch.Generator().manual_seed(width)
    weights = torch.randint(0, 4, (200, width), generator=generator)
    weights[:, width // 2] += 1
    uniform = torch.rand(200, 1, dtype=torch.float64, generator=generator)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    targets = (uniform * weights.sum(-1, keepdim=True)).long()
    expected = (weights.cumsum(-1) <= targets).sum(-1)
    places = draw(weights, uniform)
    assert torch.equal(places, expected)
    assert (weights.gather(1, places[:, None]) > 0).all()


def test_a_draw_stays_inside_where_rounding_reaches_the_total():
    weights = torch.tensor([[2**57 + 1, 2**57 - 2, 0]])
    assert draw(weights, torch.tensor([[1 - 2**-53]], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("vocab", [1, 7, 8, 15, 16, 17, 1021, 4096])
def test_the_bits_of_a_weight_do_not_depend_on_where_its_row_stands(vocab):
    """The foundation: that exp is the same function in a vector's body and in its tail, in every thread's share."""
    row = torch.linspace(-30, 0, vocab)
    ones = torch.ones(64, 1)
    for rows in (1, 2, 7, 64):
        batch = row.repeat(rows, 1)
        weights = token_weights(batch, batch.amax(-1, keepdim=True), ones[:rows])
        assert np.array_equal(weights, weights[:1].expand(rows, -1))
        assert torch.equal(weights[0], token_weights(row[None], row.amax()[None, None], ones[:1])[0])
