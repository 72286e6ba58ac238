"""Powers, logarithms, sines and cosines with the same bits on every machine.

Libraries round these functions differently, from version to version and from one instruction set to another. Here they
are made of what IEEE 754 defines to the last bit (sums, products and roundings of float64, each by itself, as numpy's
ufuncs compute them), and of `decimal`, whose `ln` and `**` are defined, too. No torch.
"""

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DECIMAL = Context(prec=40)
_HALF_PI = (0x1921FB544 / 2**32, 0x42D18469 / 2**64, 0x898CC51701B839A2 / 2**128)
"""Its first 33 bits, the next 32, and the next 53: products of the first two with integers below 2**20 are exact."""
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(9)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(10)]
"""Taylor's coefficients; up to pi / 4 the next term is below 2**-58."""


def power(base: float, exponent: Fraction) -> float:
    """base ** exponent, rounded once; `base` above 0."""
    shifted = _DECIMAL.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return float(_DECIMAL.power(Decimal(base), shifted))


def log(x: float) -> float:
    """The natural logarithm, rounded once; `x` above 0."""
    return float(_DECIMAL.ln(Decimal(x)))


def cosines_and_sines(angles: NDArray[np.float32]) -> tuple[Floats, Floats]:
    """Of angles in radians: the errors are below 2**-51 for magnitudes below 2**20, so that almost all of them, rounded
    to float32, are the correctly rounded ones.
    """
    x = angles.astype(np.float64)
    quarters = np.rint(x * (1 / _HALF_PI[0]))
    for piece in _HALF_PI:
        x = x - quarters * piece
    square = x * x
    sine, cosine = x * _polynomial(_SINE, square), _polynomial(_COSINE, square)
    quadrant = quarters.astype(np.int64) & 3
    is_odd = (quadrant & 1).astype(np.bool_)
    cosines, sines = np.where(is_odd, sine, cosine), np.where(is_odd, cosine, sine)
    return np.where((quadrant + 1) & 2, -cosines, cosines), np.where(quadrant & 2, -sines, sines)


def _polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= x
        total += coefficient
    return total
