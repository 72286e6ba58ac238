"""GPTQ: rounding with error feedback, in which later columns compensate for the rounding errors of earlier ones.

It minimizes the error of the layer's outputs on calibration inputs x, which depends on the inputs' Gram matrix only:
sum over x of |(W - Q) x|^2 = trace((W - Q) G (W - Q)^T), G = sum of x x^T. Columns are rounded one by one, those with
the largest inputs first; each error is distributed over the remaining columns with weights from G's inverse (Frantar et
al., "GPTQ", 2022, https://arxiv.org/abs/2210.17323).
"""

import torch
from torch import Tensor

from penstock.dataclass import dataclass

DAMPING = 0.01
"""Regularization: this fraction of the Gram matrix's mean diagonal is added to its diagonal."""
_MOST_DAMPING = 1.0
_BLOCK = 64
"""Columns that exchange errors among themselves before the remaining columns are updated."""
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_SMALLEST_EXPONENT = -24
"""The smallest exponent of a row's step, a power of two: float16 represents its multiples."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The representable values of each weight: scale * (q - zero), q from 0 to 2^bits - 1.

    Scales are integer multiples, up to 255, of one power of two per row, so bfloat16 and float16 store them exactly.
    """

    bits: int
    group: int
    """Columns that share a scale and a zero point."""
    scale: Tensor
    """[rows, groups] float32"""
    zero: Tensor
    """[rows, groups] float32, integers from 0 to 2^bits - 1"""

    def round(self, values: Tensor, column: int) -> Tensor:
        """Quantize `values` [rows] of a column to the nearest integers, as float32."""
        group = column // self.group
        return (values / self.scale[:, group] + self.zero[:, group]).round_().clamp_(0, 2**self.bits - 1)

    def dequantize(self, q: Tensor, column: int) -> Tensor:
        """Dequantize the integers [rows] of a column."""
        group = column // self.group
        return (q - self.zero[:, group]) * self.scale[:, group]


def fit_grid(weight: Tensor, importance: Tensor, bits: int, group: int, *, symmetric: bool) -> Grid:
    """Search the grid with the smallest weighted squared error for `weight` [rows, columns] float32.

    For each group it tries the full range and several fractions of it.

    Args:
        importance: [columns], weights of the columns' errors.
        symmetric: whether all zero points are the middle of the range.
    """
    x = weight.view(len(weight), -1, group)
    weights = importance.view(-1, group).clamp_min(1e-12)
    most = 2**bits - 1
    middle = 2.0 ** (bits - 1)
    # The range includes 0, so that 0 is one of the steps.
    low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    best: tuple[Tensor, Tensor, Tensor] | None = None
    # A smaller range clips the largest weights, and gives all others finer steps.
    for share in _SHARES:
        scale = ((high - low) * share / most).clamp_min(1e-30)
        zero = torch.full_like(scale, middle) if symmetric else (-low * share / scale).round_().clamp_(0, most)
        for _ in range(2):
            tried = _with_error(x, weights, scale, zero, most)
            best = tried if best is None else _better(best, tried)
            scale, zero = _refitted(x, weights, scale, zero, most, symmetric=symmetric)
    assert best is not None
    scale = _as_multiples(best[1])
    return Grid(bits, group, scale, best[2])


def _steps(x: Tensor, scale: Tensor, zero: Tensor, most: int) -> Tensor:
    zero = zero.unsqueeze(-1)
    return (x / scale.unsqueeze(-1) + zero).round_().clamp_(0, most).sub_(zero)


def _with_error(x: Tensor, weights: Tensor, scale: Tensor, zero: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    error = _steps(x, scale, zero, most).mul_(scale.unsqueeze(-1)).sub_(x).square_().mul_(weights).sum(-1)
    return error, scale, zero


def _better(best: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    wins = other[0] < best[0]
    error, scale, zero = (torch.where(wins, b, a) for a, b in zip(best, other, strict=True))
    return error, scale, zero


def _refitted(
    x: Tensor, weights: Tensor, scale: Tensor, zero: Tensor, most: int, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Scale and zero point refitted by weighted least squares to the integers that the given ones produce."""
    steps = _steps(x, scale, zero, most)
    weighted = steps * weights
    squares, products = (weighted * steps).sum(-1), (weighted * x).sum(-1)
    if symmetric:
        return (products / squares.clamp_min(1e-30)).clamp_min(1e-30), zero
    total, sum_q, sum_x = weights.sum(-1), weighted.sum(-1), (x * weights).sum(-1)
    slope = (total * products - sum_q * sum_x) / (total * squares - sum_q * sum_q).clamp_min(1e-30)
    slope = torch.where(slope > 0, slope, scale)
    shift = (slope * sum_q - sum_x) / (total * slope)
    return slope, (zero + shift).round_().clamp_(0, most)


def _as_multiples(scale: Tensor) -> Tensor:
    step = scale.amax(1, keepdim=True).div_(255).log2_().ceil_().clamp_min_(_SMALLEST_EXPONENT).exp2_()
    return (scale / step).round_().clamp_(1, 255) * step


def round_with_feedback(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """Quantize `weight` float32 to integers [rows, columns] uint8; `gram` is [columns, columns] of its inputs."""
    columns = weight.shape[1]
    # Columns with the largest inputs first: all others are left to make up for their errors.
    order = gram.diagonal().argsort(descending=True)
    factor = _inverse_factor(gram[order][:, order])
    rest, places = weight.T[order].contiguous(), order.tolist()  # [columns, rows]
    made = torch.empty(columns, len(weight), dtype=torch.uint8)
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        block, errors = rest[first:last], torch.empty(last - first, len(weight))
        for i, place in enumerate(places[first:last]):
            q = grid.round(block[i], place)
            made[place] = q.to(torch.uint8)
            errors[i] = (block[i] - grid.dequantize(q, place)) / factor[first + i, first + i]
            # The columns not yet rounded take over the error, as far as their inputs go together.
            block[i + 1 :].addr_(factor[first + i, first + i + 1 : last], errors[i], alpha=-1)
        # Those of later blocks at once: one product of matrices, instead of an update of all of them for each column.
        rest[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return made.T.contiguous()


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of `gram`, with as much damping as necessary."""
    mean = float(gram.diagonal().mean())
    damping = DAMPING
    while mean > 0 and damping <= _MOST_DAMPING:
        damped = gram.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        upper: Tensor
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed) and bool(upper.isfinite().all()):
                return upper
        damping *= 10
    return torch.eye(len(gram))  # no usable inputs: no error feedback
