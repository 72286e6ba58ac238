"""Masks: both versions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock import native
from penstock.kernels.mask import mask, reference
from penstock.kernels.mask import native as native_mask

Mask = Callable[..., None]
VERSIONS = [
    reference.mask,
    pytest.param(native_mask.mask, marks=pytest.mark.skipif(native.library() is None, reason="not built")),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1021])
def test_what_is_not_allowed_is_minus_infinity_and_the_rest_as_it_was(version: Mask, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    allowed = random.random((3, -(-vocab // 32) * 32)) < np.array([[0.5], [0.0], [1.0]])
    bits = np.packbits(allowed, axis=-1, bitorder="little").view(np.int32)
    expected = logits.clone()
    rows = np.array([1, 4, 3])
    for row, some in zip(rows, allowed, strict=True):
        expected[row, torch.from_numpy(~some[:vocab])] = -torch.inf
    version(logits, rows, bits)
    assert torch.equal(logits, expected)


def test_a_mask_of_another_width_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="wide"):
        mask(torch.zeros(1, 64), np.array([0]), np.zeros((1, 3), np.int32))
