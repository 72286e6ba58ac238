import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from penstock import native
from penstock.core.plan import Ending
from penstock.sampling.sampler import Sampler
from tests.kernels.versions import native_table, needs_native
from tests.sampling.batches import batch_of, params, sample, some_logits
from tests.support.torch_ops import computed_by_torch


def mixed_params(count, seed=0):
    """Rows that ask for everything, in every combination."""
    rng = random.Random(seed)
    return [
        params(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 1, 20, 300, 5000]),
            top_p=rng.choice([1.0, 0.4, 0.95, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            seed=rng.randrange(2**64),
            min_tokens=rng.choice([0, 3]),
            stop_token_ids=(2, 33),
            logprobs=rng.choice([None, 0, 5, 20]),
            typical_p=rng.choice([1.0, 1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            presence_penalty=rng.choice([0.0, -0.5]),
            share_penalty=rng.choice([0.0, 1.0]),
            logit_bias=rng.choice([(), ((5, 3.0), (30, -100.0))]),
            banned=rng.choice([(), ((3,), (8, 9, 4))]),
            allowed_token_ids=rng.choice([None, None, None, tuple(range(0, 40, 3))]),
        )
        for _ in range(count)
    ]


def test_temperature_zero_takes_the_likeliest_token_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 5.0, 5.0], [2.0, 1.0, 2.0], [-1.0, -1.0, -0.5]])
    assert sample(logits, batch_of([params(temperature=0.0)] * 3)).token_ids == [1, 0, 2]
    mixed = [params(temperature=0.0), params(temperature=0.0), params(top_k=1)]
    assert sample(logits, batch_of(mixed)).token_ids == [1, 0, 2]


@needs_native
def test_whatever_the_controls_torch_computes_nothing() -> None:
    logits, batch, sampler = some_logits(32), batch_of(mixed_params(32)), Sampler(native_table(), 32)
    assert computed_by_torch(lambda: sampler.sample(logits, batch)) == []


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-300])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature):
    logits = some_logits(8)
    for controls in ({}, {"top_k": 5}, {"top_p": 0.9}):
        result = sample(logits, batch_of([params(temperature=temperature, **controls)] * 8))
        assert result.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [1000, 1021, 40])
def test_a_row_gets_the_same_alone_and_in_any_batch_at_any_place(vocab):
    count = 64
    logits, wanted = some_logits(count, vocab), mixed_params(count)
    indices, positions = [i % 3 for i in range(count)], [7 * i + 5 for i in range(count)]
    generated = [i % 5 for i in range(count)]
    whole = sample(logits, batch_of(wanted, indices, positions, generated))
    rng = random.Random(5)
    for size in (1, 2, 7, 64):
        order = rng.sample(range(count), count)
        for start in range(0, count, size):
            rows = order[start : start + size]
            columns = ([c[r] for r in rows] for c in (wanted, indices, positions, generated))
            part = sample(logits[rows], batch_of(*columns))
            assert part.token_ids == [whole.token_ids[r] for r in rows]
            if part.logprobs:
                assert part.logprobs == [whole.logprobs[r] for r in rows]


def test_a_row_gets_the_same_whatever_the_number_of_threads():
    logits, wanted = some_logits(32, 5003), mixed_params(32, seed=1)
    threads = native.num_threads()
    try:
        native.set_num_threads(1)
        one = sample(logits, batch_of(wanted))
        native.set_num_threads(3)
        three = sample(logits, batch_of(wanted))
    finally:
        native.set_num_threads(threads)
    assert one == three


def test_seed_index_and_position_choose_different_tokens():
    logits = torch.zeros(64, 5000)
    count = range(64)
    by_seed = sample(logits, batch_of([params(seed=s) for s in count]))
    by_index = sample(logits, batch_of([params()] * 64, indices=list(count)))
    by_position = sample(logits, batch_of([params()] * 64, positions=list(count)))
    for result in (by_seed, by_index, by_position):
        assert len(set(result.token_ids)) > 55
    assert sample(logits, batch_of([params(seed=s) for s in count])) == by_seed


# The critical values of chi-squared at p = 0.001, by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32}
PROBABILITIES = [0.02, 0.30, 0.05, 0.25, 0.10, 0.15, 0.01, 0.12]
HISTORY = [1, 1, 3, 5, 3, 1]  # the first two are the prompt


@pytest.mark.parametrize(
    ("controls", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 2.0}, range(8)),
        ({"top_k": 3}, [1, 3, 5]),
        ({"top_p": 0.8}, [1, 3, 5, 7]),
        ({"top_p": 0.7, "top_k": 3}, [1, 3]),
        ({"min_p": 0.2}, [1, 3, 4, 5, 7]),
        ({"typical_p": 0.5}, [3, 5, 7]),
        ({"repetition_penalty": 1.5}, range(8)),
        ({"frequency_penalty": 0.4}, range(8)),
        ({"presence_penalty": -0.6}, range(8)),
        ({"share_penalty": 1.9}, range(8)),
        ({"logit_bias": ((0, 1.5), (1, -2.0))}, range(8)),
        ({"banned": ((1,), (3, 1, 5), (3, 2, 7))}, [0, 2, 3, 4, 6, 7]),
        ({"allowed_token_ids": (0, 2, 6)}, [0, 2, 6]),
        ({"min_tokens": 5, "stop_token_ids": (3, 4)}, [0, 1, 2, 5, 6, 7]),
        ({"frequency_penalty": 0.5, "temperature": 0.7, "top_k": 5, "top_p": 0.8}, [1, 3, 4, 7]),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(controls, kept):
    """By Pearson's test, against probabilities worked out here in words that differ from the sampler's."""
    draws = 20_000
    logits = torch.tensor(PROBABILITIES).log().repeat(draws, 1)
    batch = batch_of(
        [params(seed=seed, **controls) for seed in range(draws)],
        histories=[HISTORY] * draws,
        num_generated=[4] * draws,
    )
    observed = Counter(sample(logits, batch).token_ids)
    assert set(observed) == set(kept)
    weights = {token: math.exp(_score(token, controls) / controls.get("temperature", 1.0)) for token in kept}
    expected = {token: draws * weight / sum(weights.values()) for token, weight in weights.items()}
    statistic = sum((observed[t] - expected[t]) ** 2 / expected[t] for t in expected)
    assert statistic < CRITICAL[len(expected) - 1]


def _score(token, controls):
    score = math.log(PROBABILITIES[token]) + dict(controls.get("logit_bias", ())).get(token, 0.0)
    if token in HISTORY:
        score *= controls.get("repetition_penalty", 1.0)  # all are below 0
    answer = HISTORY[2:]
    score -= controls.get("frequency_penalty", 0.0) * answer.count(token)
    score -= controls.get("presence_penalty", 0.0) * (token in answer)
    return score - controls.get("share_penalty", 0.0) * HISTORY.count(token) / len(HISTORY)


def test_stop_tokens_are_not_drawn_before_min_tokens():
    logits = torch.zeros(4, 10)
    logits[:, 3], logits[:, 4] = 50.0, 20.0
    early = params(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    for wanted in (early, replace(early, temperature=1.0), replace(early, temperature=1.0, top_p=0.9)):
        result = sample(logits.clone(), batch_of([wanted] * 4, num_generated=[0, 1, 2, 3]))
        assert result.token_ids == [4, 4, 3, 3]


@pytest.mark.parametrize("controls", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("others", [{"temperature": 0.0}, {"top_p": 0.9}])
def test_a_row_that_is_not_finite_fails_alone(controls, others):
    logits = some_logits(7, 400)
    wanted = [params(**others, logprobs=2) for _ in range(7)]
    expected = sample(logits, batch_of(wanted))
    for row in (1, 3, 5):
        wanted[row] = params(**controls, logprobs=2, min_tokens=int(row < 5), stop_token_ids=(8,))
    logits[1, 8] = math.nan
    logits[3, 8] = math.inf
    logits[5] = -math.inf
    result = sample(logits, batch_of(wanted))
    assert result.endings == dict.fromkeys((1, 3, 5), Ending.NOT_FINITE)
    assert [result.token_ids[row] for row in (1, 3, 5)] == [None] * 3
    assert [result.logprobs[row] for row in (1, 3, 5)] == [None, None, None]
    for row in (0, 2, 4, 6):
        assert result.token_ids[row] == expected.token_ids[row]
        assert result.logprobs[row] == expected.logprobs[row]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_controls_leave_no_token_fails_alone_and_says_so(temperature):
    logits = some_logits(6, 50)
    nothing = [
        {"allowed_token_ids": (4, 5), "banned": ((4,), (9, 5))},
        {"allowed_token_ids": (4,), "min_tokens": 3, "stop_token_ids": (4,)},
        {"banned": tuple((token,) for token in range(50))},
    ]
    wanted = [params(temperature=temperature, logprobs=1) for _ in range(6)]
    expected = sample(logits, batch_of(wanted, histories=[[1, 9]] * 6))
    for row, controls in zip((0, 2, 5), nothing, strict=True):
        wanted[row] = params(temperature=temperature, logprobs=1, **controls)
    result = sample(logits, batch_of(wanted, histories=[[1, 9]] * 6))
    for row in range(6):
        assert result.token_ids[row] == (None if row in (0, 2, 5) else expected.token_ids[row])
        assert result.endings.get(row) == (Ending.NO_TOKEN_LEFT if row in (0, 2, 5) else None)
        assert result.logprobs[row] == (None if row in (0, 2, 5) else expected.logprobs[row])


def test_a_bias_of_a_hundred_takes_a_token_and_one_of_minus_a_hundred_none():
    logits = some_logits(200, 300)
    seeds = range(200)
    taken = [params(seed=seed, logit_bias=((7, 100.0),)) for seed in seeds]
    assert set(sample(logits, batch_of(taken)).token_ids) == {7}
    likeliest = int(logits[0].argmax())
    left = [params(seed=seed, logit_bias=((likeliest, -100.0),)) for seed in seeds]
    assert likeliest not in sample(logits[:1].repeat(200, 1), batch_of(left)).token_ids


def test_tokens_at_minus_infinity_are_never_drawn():
    logits = torch.full((400, 300), -math.inf)
    logits[:, 100:110] = 0.0
    for controls in ({}, {"top_k": 200}, {"top_p": 0.999}):
        result = sample(logits, batch_of([params(**controls)] * 400, positions=list(range(400))))
        assert set(result.token_ids) == set(range(100, 110))


@pytest.mark.parametrize("controls", [{"temperature": 0.0}, {"temperature": 0.5, "top_k": 10, "min_p": 0.1}])
def test_logprobs_are_those_of_the_model_before_any_control(controls):
    logits = some_logits(6, 2000)
    expected = logits.double().log_softmax(-1)
    wanted = [params(**controls, logprobs=k, min_tokens=1, stop_token_ids=(5,)) for k in (0, 1, 5, 20, 20)]
    result = sample(logits, batch_of([*wanted, params(**controls)]))
    for row, token in enumerate(result.token_ids[:5]):
        entry, k = result.logprobs[row], wanted[row].logprobs
        best, ids = expected[row].topk(k)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-6)
        assert [t for t, _ in entry.top] == ids.tolist()
        assert [x for _, x in entry.top] == pytest.approx(best.tolist(), abs=1e-6)
    assert result.logprobs[5] is None


def test_equally_likely_tokens_are_listed_by_id():
    logits = torch.zeros(1, 5000)
    logits[0, 4000] = 1.0
    top = sample(logits, batch_of([params(temperature=0.0, logprobs=4)])).logprobs[0].top
    assert [token for token, _ in top] == [4000, 0, 1, 2]


def test_asking_for_logprobs_changes_no_token():
    """Not even where a tie at the edge of the list has the row searched again."""
    logits = some_logits(40, 2000).round()
    asking = [replace(p, logprobs=20) for p in mixed_params(40)]
    silent = [replace(p, logprobs=None) for p in asking]
    assert sample(logits, batch_of(asking)).token_ids == sample(logits, batch_of(silent)).token_ids


def test_nobody_asking_for_logprobs_gives_none():
    assert sample(some_logits(2), batch_of([params()] * 2)).logprobs is None


def test_logprobs_of_a_small_vocabulary_list_it_whole():
    entry = sample(torch.tensor([[0.0, 1.0, 2.0]]), batch_of([params(logprobs=20)])).logprobs[0]
    assert [token for token, _ in entry.top] == [2, 1, 0]


def test_a_nucleus_wider_than_the_first_search_is_drawn_from_whole():
    vocab, draws = 600, 1800
    logits = torch.zeros(draws, vocab)
    result = sample(logits, batch_of([params(top_p=0.5)] * draws, positions=list(range(draws))))
    counts = torch.bincount(torch.tensor(result.token_ids), minlength=vocab).double()
    assert counts[300:].sum() == 0
    statistic = ((counts[:300] - draws / 300) ** 2 / (draws / 300)).sum().item()
    assert statistic < 380  # chi-squared, 299 degrees of freedom, p = 0.001: 379.8
