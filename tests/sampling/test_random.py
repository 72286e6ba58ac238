import numpy as np
import pytest

from penstock.sampling.random import philox, uniforms

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, output
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def column(words):
    return np.array(words, dtype=np.uint64)[:, None]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox(column(counter), column(key))[:, 0].tolist() == expected


def test_philox_gives_each_counter_its_own_answer_in_a_batch():
    counters, keys = (np.hstack([column(v[i]) for v in KNOWN_ANSWERS]) for i in (0, 1))
    assert philox(counters, keys).T.tolist() == [v[2] for v in KNOWN_ANSWERS]


def test_a_number_depends_on_its_key_alone():
    seeds, indices, positions = [3, 2**64 - 1, 3, 0], [0, 1, 7, 0], [10, 2**31, 10, 0]
    together = uniforms(seeds, indices, positions)
    alone = [uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert together.tolist() == alone


def test_seed_index_and_position_each_change_the_number():
    base = (5, 1, 9)
    keys = [base, (6, 1, 9), (5 + 2**32, 1, 9), (5, 2, 9), (5, 1, 10), (1, 5, 9), (5, 9, 1)]
    numbers = uniforms(*map(list, zip(*keys, strict=True)))
    assert len(set(numbers.tolist())) == len(keys)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_numbers_along_each_part_of_the_key_are_uniform_and_uncorrelated(axis):
    count = 100_000
    key = [[17] * count, [0] * count, [0] * count]
    key[axis] = list(range(count))
    numbers = uniforms(*key)
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    observed = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((observed - 1000) ** 2 / 1000).sum() < 148.2  # chi-squared, 99 degrees of freedom, p = 0.001
    for lag in (1, 2, 64):
        correlation = np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]
        assert abs(correlation) < 4 / count**0.5
