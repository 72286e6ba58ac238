"""Gather, scale, sums, gates and RMS normalisation, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.feed_forward import Activation
from penstock.kernels.elementwise import Columns

_CLAMPED_SWIGLU_LIMIT, _CLAMPED_SWIGLU_ALPHA = 7.0, 1.702


def gather(table: Tensor, row_ids: Tensor) -> Tensor:
    """`table` [rows, ...], `row_ids` [count] int64, each below `rows` -> [count, ...]."""
    return table.index_select(0, row_ids)


def copy_columns(x: Tensor, out: Tensor, columns: Columns) -> None:
    """Copy columns of each row of `x` [rows, any] to columns of `out` [rows, any]."""
    for head in range(columns.heads):
        first, to = columns.first + head * columns.step, columns.to + head * columns.to_step
        part = x[:, first : first + columns.count]
        if columns.paired:
            part = torch.cat((part[:, ::2], part[:, 1::2]), 1)
        out[:, to : to + columns.count] = part


def scale(x: Tensor, factor: float) -> Tensor:
    """`x` [rows, columns] is given up; each element is multiplied in float32 and rounded once."""
    return x.mul_(factor)


def add_rows(x: Tensor, residual: Tensor, factor: float) -> Tensor:
    """Sum of `factor * x` and `residual`, of one shape, which is given up."""
    return residual.add_(x, alpha=factor)


def activate_gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Gated linear units (Shazeer, 2020, arXiv:2002.05202).

    `gate_up` [num_tokens, 2 * size], gate first -> act(gate) * up [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_CLAMPED_SWIGLU_LIMIT), up.clamp(-_CLAMPED_SWIGLU_LIMIT, _CLAMPED_SWIGLU_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _CLAMPED_SWIGLU_ALPHA))
    return activate(gate, activation).mul_(up)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of a map without a gate, of each element."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "relu2":
        return F.relu(x).square_()
    assert activation == "silu"
    return F.silu(x)


def head_gates(x: Tensor, query: Tensor, num_heads: int) -> Tensor:
    """Each of the heads of `x` [num_tokens, num_heads * head_dim] times the sigmoid of its gate; `x` is given up.

    `query` [num_tokens, ...]: each of its first heads has its gate behind it, as long as itself.
    """
    head_dim = x.shape[1] // num_heads
    gates = query[:, : 2 * x.shape[1]].view(len(x), num_heads, 2, head_dim)[:, :, 1]
    return x.mul_(gates.sigmoid().flatten(1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., size] over the root mean square of its last axis, times `weight` [size] -> [..., size].

    Zhang and Sennrich, 2019, arXiv:1910.07467. The mean is taken in float32 and the result rounded to the type of
    `weight` before that is applied, as the checkpoints were trained.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def rms_norm_columns(x: Tensor, first: int, weight: Tensor, eps: float) -> None:
    """The columns of `x` from `first` on that `weight` is for, normalised in place."""
    columns = x[:, first : first + len(weight)]
    columns.copy_(rms_norm(columns, weight, eps))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float) -> tuple[Tensor, Tensor]:
    """The residual stream goes on: (norm of the sum, sum of `factor * x` and `residual`), each of the shape of `x`."""
    total = torch.add(residual, x, alpha=factor)
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`x` [rows, size], less its mean and over its standard deviation, times `weight`, plus `bias` -> the same shape.

    Ba et al., 2016, arXiv:1607.06450.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, factor: float
) -> tuple[Tensor, Tensor]:
    """The residual stream goes on: (norm of the sum, sum of `factor * x` and `residual`), each of the shape of `x`."""
    total = torch.add(residual, x, alpha=factor)
    return layer_norm(total, weight, bias, eps), total


def norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, factor: float) -> Tensor:
    """`add_layer_norm` without the sum."""
    return add_layer_norm(x, residual, weight, bias, eps, factor)[0]
