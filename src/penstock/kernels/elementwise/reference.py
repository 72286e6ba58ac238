"""Gather, scale, the gated activation and RMS normalisation, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def gather(table: Tensor, row_ids: Tensor) -> Tensor:
    """`table` [rows, ...], `row_ids` [count] int64, each below `rows` -> [count, ...]."""
    return table.index_select(0, row_ids)


def scale(x: Tensor, factor: float) -> Tensor:
    """`x` [rows, columns] is given up; each element is multiplied in float32 and rounded once."""
    return x.mul_(factor)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's activation (Shazeer, 2020, arXiv:2002.05202).

    `gate_up` [num_tokens, 2 * size], gate first -> silu(gate) * up [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., size] over the root mean square of its last axis, times `weight` [size] -> [..., size].

    Zhang and Sennrich, 2019, arXiv:1910.07467. The mean is taken in float32 and the result rounded to the type of `x`
    before the weight is applied, as the checkpoints were trained.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float) -> tuple[Tensor, Tensor]:
    """The residual stream goes on: (norm of the sum, sum of `factor * x` and `residual`), each of the shape of `x`."""
    total = torch.add(residual, x, alpha=factor)
    return rms_norm(total, weight, eps), total
