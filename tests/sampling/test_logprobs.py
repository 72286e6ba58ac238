"""Log-probabilities of given tokens."""

import math

import pytest
import torch

from penstock.sampling.sampler import token_logprobs
from tests.sampling.batches import OPS


def some_logits(rows, vocab=1000, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * spread


def test_they_are_those_of_the_softmax():
    logits = some_logits(8)
    tokens = [3, 999, 0, 17, 5, 5, 500, 2]
    expected = logits.double().log_softmax(-1)
    for row, entry in enumerate(token_logprobs(OPS, logits, tokens, [0, 1, 5, 20, 0, 3, 2, 1])):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-6)
        values, names = expected[row].topk(20)
        assert [token for token, _ in entry.top] == names.tolist()[: len(entry.top)]
        assert [value for _, value in entry.top] == pytest.approx(values.tolist()[: len(entry.top)], abs=1e-6)
    assert [len(e.top) for e in token_logprobs(OPS, logits, tokens, [0, 1, 5, 20, 0, 3, 2, 1])] == [
        0,
        1,
        5,
        20,
        0,
        3,
        2,
        1,
    ]


def test_a_row_has_the_same_ones_bit_for_bit_in_every_company():
    logits = some_logits(300, vocab=5000)
    tokens = [row * 7 % 5000 for row in range(300)]
    together = token_logprobs(OPS, logits, tokens, [3] * 300)
    assert together[::37] == [token_logprobs(OPS, logits[r : r + 1], [tokens[r]], [3])[0] for r in range(0, 300, 37)]
    assert together[:50] == token_logprobs(OPS, logits[:50], tokens[:50], [3] * 50)


def test_of_equally_likely_tokens_the_lower_ids_are_named():
    logits = torch.zeros(2, 400)
    logits[1, 399] = 1.0
    first, second = token_logprobs(OPS, logits, [5, 5], [3, 3])
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [token for token, _ in second.top] == [399, 0, 1]


def test_an_impossible_token_has_minus_infinity_and_a_row_that_is_no_number_has_none():
    logits = some_logits(3)
    logits[0, 4] = -math.inf
    logits[1, 9] = math.nan
    logits[2, 9] = math.inf
    entries = token_logprobs(OPS, logits, [4, 4, 4], [1, 1, 1])
    assert entries[0].logprob == -math.inf
    assert math.isnan(entries[1].logprob)
    assert math.isnan(entries[2].logprob)


def test_no_more_tokens_are_named_than_there_are():
    (entry,) = token_logprobs(OPS, torch.zeros(1, 4), [2], [20])
    assert [token for token, _ in entry.top] == [0, 1, 2, 3]
