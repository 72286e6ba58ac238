"""Round-to-nearest quantization in plain torch; `csrc/quantize.cpp` has the same float32 operations in the same order.

    centred   w ≈ scale * (q - 2 ** (bits - 1))
    shifted   w ≈ scale * (q - zero / units)    zero from 0 to 127

A group of columns has a scale, an 8-bit multiple of its row's step. For each group, the full range and a fraction
of it are tried; the fraction clips the largest weights and represents all others more finely. Scale and zero point are
then refitted by least squares to the resulting integers, several times.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from penstock.config.weight_formats import WeightFormat
from penstock.dataclass import dataclass
from penstock.kernels.arrays import array_of, tensor_of
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.quantize import zero_units

SHARE = 0.9
ROUNDS = 2
LARGEST = 1e30
"""Largest magnitude of a weight: sums of its products with integers remain finite."""
_SMALLEST_STEP = 1e-37  # the inverse of a smaller step may be infinite
_BLOCK = 2**20  # weights that are processed at a time


def quantize(weight: NDArray[Any], format: WeightFormat) -> Quantized | None:
    """Quantize `weight` [out, in] of any float dtype; None if an element is not finite or too large."""
    parts = []
    for block in torch.split(tensor_of(weight), max(1, _BLOCK // weight.shape[1])):
        if not bool((block.float().abs() <= LARGEST).all()):
            return None
        parts.append(_quantize_rows(block.float(), format))
    values, scales, zeros, steps = (torch.cat(part) for part in zip(*parts, strict=True))
    shifted = zero_units(format) > 0
    values = values + (0 if shifted else format.centre)
    return Quantized(
        array_of(values[:, : weight.shape[1]].to(torch.uint8)),
        array_of(scales.to(torch.uint8)),
        array_of(zeros.to(torch.uint8)) if shifted else None,
        array_of(steps),
    )


def _quantize_rows(rows: Tensor, format: WeightFormat) -> tuple[Tensor, ...]:
    """Integers [rows, columns], scales and zero points [rows, groups] and row steps [rows, 1], all as float32."""
    units = float(zero_units(format))
    columns = pad(rows, (0, -rows.shape[1] % format.group)).view(len(rows), -1, format.group).unbind(-1)
    lowest = 0.0 if units else -float(format.centre)
    groups = _Groups(columns, lowest, lowest + 2**format.bits - 1, units > 0)
    fit = groups.search()
    step = fit.scale.amax(1, keepdim=True) / 255.0
    multiples = (fit.scale * _inverse(step)).round().clamp(1.0, 255.0)
    scale = step * multiples
    zeros = groups.zeros(scale, fit.minimum, units) if units else torch.zeros_like(scale)
    inverse, zero = _inverse(scale), zeros / units if units else zeros
    values = torch.stack([groups.integer(x, inverse, zero) for x in columns], -1)
    return values.flatten(1), multiples, zeros, step


def _inverse(step: Tensor) -> Tensor:
    return torch.where(step > _SMALLEST_STEP, 1.0 / step, 0.0)


def _sum(parts: "list[Tensor] | tuple[Tensor, ...]") -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


@dataclass(frozen=True, slots=True)
class _Fit:
    """The fit of each group, and the reduction of its squared error; [rows, groups]."""

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
    """Groups of weights, and the range of their integers."""

    columns: tuple[Tensor, ...]
    """Element n: the n-th weight of each group, [rows, groups]"""
    lowest: float
    highest: float
    shifted: bool
    """Whether the groups have a minimum."""

    def integer(self, x: Tensor, inverse: Tensor, zero: Tensor) -> Tensor:
        return (x * inverse + zero).round().clamp(self.lowest, self.highest)

    def integers(self, scale: Tensor, minimum: Tensor) -> list[Tensor]:
        inverse = _inverse(scale)
        return [self.integer(x, inverse, minimum * inverse) for x in self.columns]

    def refitted(self, scale: Tensor, minimum: Tensor, sum_x: Tensor) -> _Fit:
        """The least-squares fit to the integers that this scale and minimum produce. A minimum below 0 becomes 0."""
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
        best = self.refitted(step, depth if self.shifted else torch.zeros_like(depth), sum_x)
        clipped = depth * SHARE if self.shifted else torch.zeros_like(depth)
        best = best.or_better(self.refitted(step * SHARE, clipped, sum_x))
        for _ in range(ROUNDS):
            best = best.or_better(self.refitted(best.scale, best.minimum, sum_x))
        return best

    def zeros(self, scale: Tensor, minimum: Tensor, units: float) -> Tensor:
        """The best zero point, in `units` per step, after the scale has been rounded."""
        zero = (_sum(self.integers(scale, minimum)) - _sum(self.columns) * _inverse(scale)) / float(len(self.columns))
        return (zero * units).round().clamp(0.0, 127.0)
