"""Round to nearest, at the scale that leaves the smallest squared error of those tried; in plain torch.

A group of weights is tried at its full range and at shares of it, which clip its largest weights and hold all others
more finely. Then the scale is fitted by least squares to the best integers found.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.quantize import GROUP, Int4, Int6, Int8

SHARES = (0.95, 0.9, 0.85, 0.8, 0.75)
LARGEST_INT8 = 3e38
"""Twice the largest magnitude that 8 bits take: a float32 holds it."""
LARGEST_SCALE = 65504.0
"""Of a group, whose scale is a float16."""
_SMALLEST_SCALE = 1e-37  # the inverse of a smaller one may be infinite
_BLOCK = 2**20  # weights that are worked on at one time


def quantize_int8(weight: Tensor) -> Int8 | None:
    """`weight` [out, in] of any float type; None where a weight is not finite or too large."""
    parts = []
    for block in _blocks(weight):
        most = block.abs().amax(-1, keepdim=True)
        if not bool((2 * most <= LARGEST_INT8).all()):
            return None
        parts.append(_search(_Groups(block, -127.0, 127.0), -most, most))
    q, scale, _ = (torch.cat(part) for part in zip(*parts, strict=True))
    return Int8(q.to(torch.int8), scale.squeeze(-1))


def quantize_int6(weight: Tensor) -> Int6 | None:
    """`weight` [out, in] of any float type; None where a weight is not finite or too large."""
    made = _quantize_groups(weight, -31.0, 31.0, shifted=False)
    return None if made is None else Int6(made[0].to(torch.int8), made[1])


def quantize_int4(weight: Tensor) -> Int4 | None:
    """`weight` [out, in] of any float type; None where a weight is not finite or too large."""
    made = _quantize_groups(weight, 0.0, 15.0, shifted=True)
    return None if made is None else Int4(made[0].to(torch.uint8), made[1], made[2].to(torch.uint8))


def _quantize_groups(weight: Tensor, lowest: float, highest: float, *, shifted: bool) -> tuple[Tensor, ...] | None:
    """Integers [out, in], scales and zeros [out, groups], as float32."""
    columns, parts = weight.shape[1], []
    for block in _blocks(weight):
        groups = pad(block, (0, -columns % GROUP)).view(len(block), -1, GROUP)
        low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
        if not shifted:
            high = torch.maximum(-low, high)
            low = -high
        if not bool((high - low <= LARGEST_SCALE * (highest - lowest)).all()):
            return None
        parts.append(_search(_Groups(groups, lowest, highest, half=True, shifted=shifted), low, high))
    q, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    return q.flatten(1)[:, :columns], scale.squeeze(-1), zero.squeeze(-1)


def _blocks(weight: Tensor) -> list[Tensor]:
    return [block.float() for block in torch.split(weight, max(1, _BLOCK // weight.shape[1]))]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Weights, their groups along the last axis, and the integers that they may become."""

    x: Tensor
    lowest: float
    highest: float
    half: bool = False
    """Its scale must be a float16."""
    shifted: bool = False
    """It has a zero."""

    def rounded(self, scale: Tensor) -> Tensor:
        return scale.half().float() if self.half else scale

    def integers(self, scale: Tensor, zero: Tensor) -> Tensor:
        inverse = torch.where(scale > _SMALLEST_SCALE, 1.0 / scale, 0.0)
        return self.x.mul(inverse).add_(zero).round_().clamp_(self.lowest, self.highest)

    def error(self, scale: Tensor, zero: Tensor) -> Tensor:
        values = self.integers(scale, zero).sub_(zero).mul_(scale)
        return values.sub_(self.x).square_().sum(-1, keepdim=True)


def _search(groups: _Groups, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(integers, scale, zero) of the smallest error, as float32; `low` <= 0 <= `high` bound the weights."""
    scale, zero = _spanning(groups, low, high, 1.0)
    error = groups.error(scale, zero)
    for share in SHARES:
        other = _spanning(groups, low, high, share)
        scale, zero, error = _better(groups, (scale, zero, error), other)
    steps = groups.integers(scale, zero).sub_(zero)
    squares = steps.square().sum(-1, keepdim=True)
    fitted = torch.where(squares > 0, (steps * groups.x).sum(-1, keepdim=True) / squares, 0.0)
    scale, zero, _ = _better(groups, (scale, zero, error), (groups.rounded(fitted), zero))
    return groups.integers(scale, zero), scale, zero


def _spanning(groups: _Groups, low: Tensor, high: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The scale and zero that span this share of the bounds."""
    scale = groups.rounded((high - low) * share / (groups.highest - groups.lowest))
    zero = torch.zeros_like(scale)
    if groups.shifted:
        zero = torch.where(scale > 0, (-low * share / scale).round().clamp_max(groups.highest), 0.0)
    return scale, zero


def _better(
    groups: _Groups, best: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    error = groups.error(*other)
    wins = error < best[2]
    return torch.where(wins, other[0], best[0]), torch.where(wins, other[1], best[1]), torch.where(wins, error, best[2])
