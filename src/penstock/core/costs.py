"""Measurements used by speculation: seconds per step size, and acceptance rates of drafts."""

from bisect import bisect, insort
from collections import deque

WINDOW = 7
"""Number of latest steps per size; their median is its cost, so outliers do not count."""
GROWTH = 0.03
"""Assumed relative cost of one more token until steps of two sizes have been measured."""
CERTAINTY = 1.0
"""Weight of the prior, in observed drafts (pseudo-count)."""
FADING = 0.99


class StepCosts:
    """Duration of a step by its number of tokens: medians of recent steps, interpolated linearly."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._sizes: list[int] = []  # ascending
        self._medians: dict[int, float] = {}
        self._estimates: dict[int, float] = {}

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._sizes)

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = _rounded(num_tokens)
        latest = self._latest.get(size)
        if latest is None:
            latest = self._latest[size] = deque(maxlen=WINDOW)
            insort(self._sizes, size)
        latest.append(max(seconds, 1e-9))
        median = sorted(latest)[len(latest) // 2]
        if abs(median - self._medians.get(size, 0.0)) > 0.02 * median:
            self._medians[size] = median
            self._estimates.clear()

    def seconds(self, num_tokens: int) -> float:
        """Estimated seconds of a step of `num_tokens`."""
        estimate = self._estimates.get(num_tokens)
        if estimate is None:
            estimate = self._estimates[num_tokens] = self._estimate(num_tokens)
        return estimate

    def _estimate(self, num_tokens: int) -> float:
        sizes, medians = self._sizes, self._medians
        lowest, highest = sizes[0], sizes[-1]
        if lowest == highest:
            growth = 1 + GROWTH * abs(num_tokens - lowest)
            return medians[lowest] * (growth if num_tokens > lowest else 1 / growth)
        if num_tokens > highest:
            left, right, base = lowest, highest, highest
        else:
            above = min(max(bisect(sizes, num_tokens), 1), len(sizes) - 1)
            left, right = sizes[above - 1], sizes[above]
            base = left
        slope = max(0.0, (medians[right] - medians[left]) / (right - left))
        return max(medians[base] + slope * (num_tokens - base), 0.25 * medians[lowest])


def _rounded(num_tokens: int) -> int:
    """The size class: exact up to 16 tokens, eight classes per doubling above."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return num_tokens // step * step


class Acceptance:
    """Exponentially weighted acceptance rate of drafts."""

    __slots__ = ("_memory", "_right", "_tried")

    def __init__(self, memory: float) -> None:
        """
        Args:
            memory: factor by which past observations decay with each draft.
        """
        self._memory = memory
        self._right = self._tried = 0.0

    @property
    def is_new(self) -> bool:
        """Whether nothing has been recorded."""
        return not self._tried

    def learn(self, right: int, wrong: bool) -> None:
        """Record `right` accepted drafts in a row, then possibly a rejected one."""
        for outcome in (1.0,) * right + (0.0,) * wrong:
            self._right = self._memory * self._right + outcome
            self._tried = self._memory * self._tried + 1.0

    def fade(self) -> None:
        """Decay towards the prior after a step without a draft."""
        self._right *= FADING
        self._tried *= FADING

    def chance(self, prior: float) -> float:
        """Probability that the next draft is accepted; `prior` until something was recorded."""
        return (self._right + CERTAINTY * prior) / (self._tried + CERTAINTY)
