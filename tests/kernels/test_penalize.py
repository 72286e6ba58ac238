"""Penalties by the native kernel, the reference, and the definition."""

from array import array

import numpy as np
import pytest
import torch

from penstock import native
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import CountTable
from tests.kernels.versions import REFERENCE, VERSIONS, native_table, needs_native

VOCAB = 3000
PENALTIES = [
    (1.05, 0.0, 0.0, 0.0),
    (1.0, 0.3, 0.7, 0.0),
    (0.7, -0.1, 0.0, 0.0),
    (1.0, 0.0, 0.0, 0.0123),
    (1.3, 0.21, -0.5, -0.007),
]


def tables(seed: int) -> list[CountTable]:
    rng = np.random.default_rng(seed)
    made = []
    for size in (1, 40, 1500, VOCAB, 7):
        tokens = np.sort(rng.choice(VOCAB, size, replace=False))
        totals = rng.integers(0, 5, size)
        columns = (tokens, totals, np.minimum(totals, rng.integers(0, 3, size)))
        made.append(CountTable(*(array("i", column.astype(np.int32).tobytes()) for column in columns)))
    return made


def logits_of(seed: int) -> torch.Tensor:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    logits[3, ::7], logits[3, 1::7], logits[3, 2::7] = float("nan"), float("inf"), -float("inf")
    return logits


ROWS = np.array([6, 0, 3, 7, 2])


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
def test_the_native_kernel_gives_the_references_bits(threads: int) -> None:
    native.set_num_threads(threads)
    try:
        for seed in range(4):
            found, right = logits_of(seed), logits_of(seed)
            native_table().penalize(found, ROWS, np.array(PENALTIES), tables(seed), undo=False)
            REFERENCE.penalize(right, ROWS, np.array(PENALTIES), tables(seed), undo=False)
            assert torch.equal(found.view(torch.int32), right.view(torch.int32))
    finally:
        native.set_num_threads(1)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_logit_is_as_the_definition_says(version: Ops) -> None:
    found, before, counted = logits_of(9), logits_of(9), tables(9)
    version.penalize(found, ROWS, np.array(PENALTIES), counted, undo=False)
    expected = before.double()
    for row, (repetition, frequency, presence, share), table in zip(ROWS, PENALTIES, counted, strict=True):
        for token, total, answer in zip(*table, strict=True):
            if total:
                logit = float(before[row, token])
                logit = logit * repetition if logit < 0 else logit / repetition
                expected[row, token] = logit - (frequency * answer + presence) * (answer > 0) - share * total
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_to_be_undone_is_undone(version: Ops) -> None:
    found, before = logits_of(2), logits_of(2)
    undo = version.penalize(found, ROWS, np.array(PENALTIES), tables(2), undo=True)
    assert not torch.equal(found.nan_to_num(), before.nan_to_num())
    undo()
    assert torch.equal(found.view(torch.int32), before.view(torch.int32))
