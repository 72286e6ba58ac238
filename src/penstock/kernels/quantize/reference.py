"""Round to nearest, in plain torch; `csrc/quantize.cpp` does the same float32 operations in the same order.

    centred   w ≈ scale * (q - 2 ** (bits - 1))
    shifted   w ≈ scale * (q - e / 8)           e from 0 to 127

32 columns are a group, whose scale is an 8-bit multiple of its row's step. A group is tried at its full range and at
shares of it, which clip its largest weights and hold all others more finely; each time scale and zero are fitted by
least squares to the integers that come out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.linear.quantized import Quantized
from penstock.weight_formats import WeightFormat

SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
LARGEST = 1e30
"""Magnitude of a weight: sums of products of 32 of them are finite."""
_SMALLEST_STEP = 1e-37  # the inverse of a smaller one may be infinite
_BLOCK = 2**20  # weights that are worked on at one time


def quantize(weight: Tensor, format: WeightFormat) -> Quantized | None:
    """`weight` [out, in] of any float type; None where a weight is not finite or too large."""
    parts = []
    for block in torch.split(weight, max(1, _BLOCK // weight.shape[1])):
        if not bool((block.float().abs() <= LARGEST).all()):
            return None
        parts.append(_quantize_rows(block.float(), format))
    values, scales, eighths, steps = (torch.cat(part) for part in zip(*parts, strict=True))
    shifted = format.offset == "eighths"
    values = values + (0 if shifted else format.centre)
    return Quantized(
        values[:, : weight.shape[1]].to(torch.uint8),
        scales.to(torch.uint8),
        eighths.to(torch.uint8) if shifted else None,
        steps,
    )


def _quantize_rows(rows: Tensor, format: WeightFormat) -> tuple[Tensor, ...]:
    """Integers [rows, columns], scales and eighths [rows, groups], the rows' steps [rows, 1], all as float32."""
    assert format.group == 32
    shifted = format.offset == "eighths"
    columns = pad(rows, (0, -rows.shape[1] % format.group)).view(len(rows), -1, format.group).unbind(-1)
    lowest = 0.0 if shifted else -float(format.centre)
    groups = _Groups(columns, lowest, lowest + 2**format.bits - 1, shifted)
    fit = groups.search()
    step = fit.scale.amax(1, keepdim=True) / 255.0
    multiples = (fit.scale * _inverse(step)).round().clamp(1.0, 255.0)
    scale = step * multiples
    eighths = groups.eighths(scale, fit.minimum) if shifted else torch.zeros_like(scale)
    inverse, zero = _inverse(scale), eighths * 0.125
    values = torch.stack([groups.integer(x, inverse, zero) for x in columns], -1)
    return values.flatten(1), multiples, eighths, step


def _inverse(step: Tensor) -> Tensor:
    return torch.where(step > _SMALLEST_STEP, 1.0 / step, 0.0)


def _sum(parts: "list[Tensor] | tuple[Tensor, ...]") -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


@dataclass(frozen=True, slots=True)
class _Fit:
    """Of each group: the fit, and by how much it lessens the sum of squares; [rows, groups]."""

    scale: Tensor
    minimum: Tensor
    gain: Tensor

    def or_better(self, other: "_Fit") -> "_Fit":
        wins = self.gain < other.gain
        return _Fit(
            torch.where(wins, other.scale, self.scale),
            torch.where(wins, other.minimum, self.minimum),
            torch.where(wins, other.gain, self.gain),
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of weights, and the integers that they may become."""

    columns: tuple[Tensor, ...]
    """The n-th weight of each group, [rows, groups]"""
    lowest: float
    highest: float
    shifted: bool
    """They have a minimum."""

    def integer(self, x: Tensor, inverse: Tensor, zero: Tensor) -> Tensor:
        return (x * inverse + zero).round().clamp(self.lowest, self.highest)

    def integers(self, scale: Tensor, minimum: Tensor) -> list[Tensor]:
        inverse = _inverse(scale)
        return [self.integer(x, inverse, minimum * inverse) for x in self.columns]

    def refitted(self, scale: Tensor, minimum: Tensor, sum_x: Tensor) -> _Fit:
        """The least squares fit to the integers that this scale and minimum give. A minimum below 0 becomes 0."""
        q, count = self.integers(scale, minimum), float(len(self.columns))
        sum_qq = _sum([each * each for each in q])
        sum_qx = _sum([each * x for each, x in zip(q, self.columns, strict=True)])
        bound = torch.where(sum_qq > 0.0, sum_qx / sum_qq, 0.0)
        if not self.shifted:
            return _Fit(bound, torch.zeros_like(bound), bound * sum_qx)
        sum_q = _sum(q)
        spread = count * sum_qq - sum_q * sum_q
        slope = count * sum_qx - sum_q * sum_x
        free = torch.where(spread > 0.0, slope / spread, 0.0)
        offset = (free * sum_q - sum_x) / count
        below = offset < 0.0
        return _Fit(
            torch.where(below, bound, free),
            offset.clamp_min(0.0),
            torch.where(below, bound * sum_qx - sum_x * sum_x / count, free * slope / count),
        )

    def search(self) -> _Fit:
        low, high = torch.zeros_like(self.columns[0]), torch.zeros_like(self.columns[0])
        for x in self.columns:
            low, high = torch.minimum(low, x), torch.maximum(high, x)
        depth, sum_x = 0.0 - low, _sum(self.columns)
        step = (high + depth if self.shifted else torch.maximum(high, depth)) / self.highest
        best: _Fit | None = None
        for share in SHARES:
            fit = self.refitted(step * share, depth * share if self.shifted else torch.zeros_like(depth), sum_x)
            best = fit if best is None else best.or_better(fit)
        assert best is not None
        return best.or_better(self.refitted(best.scale, best.minimum, sum_x))

    def eighths(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The best zero for a scale that was rounded since."""
        zero = (_sum(self.integers(scale, minimum)) - _sum(self.columns) * _inverse(scale)) / float(len(self.columns))
        return (zero * 8.0).round().clamp(0.0, 127.0)
