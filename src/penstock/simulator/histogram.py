"""Quantiles of very many numbers."""

import math
from collections import Counter

RESOLUTION = 2000
"""Bins to a factor of e: numbers are known to a fortieth of a per cent."""


class Histogram:
    """Positive numbers in logarithmic bins. Their mean is exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, value: float, count: int = 1) -> None:
        self.count += count
        self.total += value * count
        self._bins[round(math.log(max(value, 1e-9)) * RESOLUTION)] += count

    def add_series(self, first: float, growth: float, length: int, count: int) -> None:
        """`count` times each of `length` numbers, the first and those that grow from it in equal steps."""
        span = growth * (length - 1)
        pieces = min(length, 1 + int(abs(span) * RESOLUTION / max(first, 1e-9)))
        for piece in range(pieces):
            begin, end = piece * length // pieces, (piece + 1) * length // pieces
            self.add(first + growth * (begin + end - 1) / 2, (end - begin) * count)

    @property
    def mean(self) -> float:
        """NaN of none."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The number that this share of all does not exceed; NaN of none."""
        wanted = share * self.count
        for place in sorted(self._bins):
            wanted -= self._bins[place]
            if wanted <= 0:
                return math.exp(place / RESOLUTION)
        return math.nan
