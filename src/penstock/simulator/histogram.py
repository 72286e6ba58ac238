"""Quantiles of a large number of values."""

import math
from collections import Counter

RESOLUTION = 2000
"""Bins per factor of e; the relative resolution is 1/40 %."""


class Histogram:
    """A histogram of positive numbers in logarithmic bins, with an exact mean."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, value: float, count: int = 1) -> None:
        self.count += count
        self.total += value * count
        self._bins[round(math.log(max(value, 1e-9)) * RESOLUTION)] += count

    def add_series(self, first: float, growth: float, length: int, count: int) -> None:
        """Add an arithmetic series of `length` numbers, each `count` times."""
        span = growth * (length - 1)
        pieces = min(length, 1 + int(abs(span) * RESOLUTION / max(first, 1e-9)))
        for piece in range(pieces):
            begin, end = piece * length // pieces, (piece + 1) * length // pieces
            self.add(first + growth * (begin + end - 1) / 2, (end - begin) * count)

    @property
    def mean(self) -> float:
        """The mean; NaN without values."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The quantile for this share; NaN without values."""
        wanted = share * self.count
        for place in sorted(self._bins):
            wanted -= self._bins[place]
            if wanted <= 0:
                return math.exp(place / RESOLUTION)
        return math.nan
