"""Cost model of a step: its seconds as a function of its shape, fitted to measured steps by least squares.

    seconds = base(tokens) + per_key * keys + per_pair * pairs + per_sample * samples

`base` is piecewise linear in the number of tokens: a second token costs little, a thousandth much, since weights are
read once per step and multiplied once per token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.core.plan import StepPlan
from penstock.dataclass import dataclass

if TYPE_CHECKING:  # only fitting takes it
    import numpy as np
    from numpy.typing import NDArray

FIT_ROUNDS = 12
"""Rounds of reweighting, which reduces the weight of outliers."""
OUTLIER = 0.1
"""Relative error above which the loss is linear instead of quadratic."""


class StepShape(NamedTuple):
    """The shape of a step, which determines its cost."""

    tokens: int
    samples: int
    keys: int
    """Number of keys read: the sum of the context lengths, new tokens included."""
    pairs: int
    """Number of query-key pairs; equal to `num_keys` if each sequence has one token."""


class MeasuredStep(NamedTuple):
    """A measured step of a real engine."""

    shape: StepShape
    seconds: float


class StepCosts(Protocol):
    """The seconds of a step. For fixed tokens and samples they are linear in keys and pairs."""

    def seconds(self, shape: StepShape) -> float: ...


def shape_of(plan: StepPlan, encoded_tokens: int = 0) -> StepShape:
    """The shape of a planned step.

    Args:
        encoded_tokens: tokens that take as long as the step's layers of the vision tower.
    """
    forward = plan.forward
    tokens, keys = len(forward.token_ids), sum(forward.starts)
    pairs = keys + tokens
    if tokens > len(forward.starts):
        for count, start in zip(forward.query_lens, forward.starts, strict=True):
            if count > 1:
                pairs += (count - 1) * start + count * (count - 1) // 2
    return StepShape(tokens + encoded_tokens, len(plan.samples), keys + tokens, pairs)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The cost model with fitted coefficients."""

    base: tuple[tuple[int, float], ...]
    """(tokens, seconds) by ascending tokens, interpolated linearly and extrapolated from the last two."""
    per_key: float
    per_pair: float
    per_sample: float
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, shape: StepShape) -> float:
        tokens = shape.tokens
        base = self._known.get(tokens)
        if base is None:
            base = self._known[tokens] = self._interpolate(tokens)
        return base + self.per_key * shape.keys + self.per_pair * shape.pairs + self.per_sample * shape.samples

    def _interpolate(self, tokens: int) -> float:
        base = self.base
        if len(base) == 1:
            return base[0][1]
        above = min(max(bisect_left(base, (tokens, 0.0)), 1), len(base) - 1)
        (left, low), (right, high) = base[above - 1], base[above]
        return max(0.0, low + (high - low) * (tokens - left) / (right - left))


def fit(steps: Sequence[MeasuredStep]) -> MeasuredCosts:
    """The costs with the least squares of relative errors over the steps, without outliers (Huber, 1964).

    None of them is negative.
    """
    import numpy as np

    knots = _knots([step.shape.tokens for step in steps])
    rows = [_row(step.shape, knots) for step in steps]
    seconds = np.array([step.seconds for step in steps])
    features = np.array(rows) / seconds[:, None]  # each step counts the same, however long it is
    target = np.ones(len(rows))
    weights = target
    for _ in range(FIT_ROUNDS):
        scale = np.sqrt(weights)
        solved = _non_negative(features * scale[:, None], target * scale)
        weights = 1 / np.maximum(np.abs(features @ solved - target), OUTLIER)
    base = tuple(zip(knots, map(float, solved), strict=False))
    return MeasuredCosts(base, *map(float, solved[len(knots) :]))


def _knots(tokens: list[int]) -> list[int]:
    """The knots of `base`: 1 to 4, powers of two, and the largest number of tokens.

    Only knots with measured steps are used. Kernels differ for each small number of tokens, so three tokens may cost
    less than two.
    """
    most = max(tokens)
    wanted = sorted({3, *(1 << power for power in range(most.bit_length()))})
    knots = [min(tokens)]
    for left, knot in zip([0, *wanted], [*wanted, most], strict=False):
        if knot > knots[-1] and sum(left < count <= knot for count in tokens) >= 4:
            knots.append(knot)
    if knots[-1] < most:
        knots.append(most)
    return knots


def _row(shape: StepShape, knots: list[int]) -> list[float]:
    """A step's row of the least-squares matrix: the weights of the knots, then the other coefficients' factors."""
    row = [0.0] * len(knots)
    above = min(max(bisect_left(knots, shape.tokens), 1), len(knots) - 1)
    if len(knots) == 1:
        row[0] = 1.0
    else:
        left, right = knots[above - 1], knots[above]
        row[above] = (shape.tokens - left) / (right - left)
        row[above - 1] = 1.0 - row[above]
    return [*row, shape.keys, shape.pairs, shape.samples]


def _non_negative(features: "NDArray[np.float64]", target: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Non-negative least squares by coordinate descent."""
    import numpy as np

    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale
    products, aims = scaled.T @ scaled, scaled.T @ target
    solved = np.zeros(len(aims))
    for _ in range(4000):
        before = solved.copy()
        for place in range(len(aims)):
            if products[place, place]:
                gradient = aims[place] - products[place] @ solved
                solved[place] = max(0.0, solved[place] + gradient / products[place, place])
        if np.abs(solved - before).max() < 1e-9:
            break
    return np.asarray(solved / scale)


def median_error(costs: StepCosts, steps: Sequence[MeasuredStep]) -> float:
    """Median relative error of the predictions."""
    errors = sorted(abs(costs.seconds(step.shape) / step.seconds - 1) for step in steps)
    return errors[len(errors) // 2]
