"""Defined functions against those of this machine's C library."""

import math
from fractions import Fraction

import numpy as np
import pytest

from penstock.layers.portable_math import cosines_and_sines, log, power


@pytest.mark.parametrize("largest", [1.0, 1e4, 2.0**20])
def test_cosines_and_sines_are_the_correctly_rounded_ones(largest: float) -> None:
    angles = np.random.default_rng(0).uniform(-largest, largest, 20_000).astype(np.float32)
    for found, function in zip(cosines_and_sines(angles), (math.cos, math.sin), strict=True):
        exact = np.array([function(angle) for angle in angles.tolist()])
        assert np.abs(found - exact).max() < 2**-51
        assert (found.astype(np.float32) == exact.astype(np.float32)).all()


def test_the_quadrants_and_zero_have_their_signs() -> None:
    cosines, sines = cosines_and_sines(np.array([0.0, 1.0, 2.0, 4.0, 6.0, -1.0], np.float32))
    assert np.sign(cosines).tolist() == [1, 1, -1, -1, 1, 1]
    assert np.sign(sines).tolist() == [0, 1, 1, -1, -1, -1]


def test_powers_and_logarithms_are_those_of_the_library_to_its_last_bit() -> None:
    for exponent in (Fraction(-1, 3), Fraction(0), Fraction(126, 128), Fraction(-10)):
        assert power(1e6, exponent) == pytest.approx(1e6 ** float(exponent), rel=2**-51)
    for x in (1, 0.3, 7, 1e300):
        assert log(x) == pytest.approx(math.log(x), rel=2**-52)
