"""Row-wise operations in plain torch: gather, scatter, scale, activations, sums, gates and normalization."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.config.feed_forward import Activation
from penstock.kernels.batch import Batch
from penstock.kernels.elementwise import Columns, ElementActivation, NormWeight

_CLAMPED_SWIGLU_LIMIT, _CLAMPED_SWIGLU_ALPHA = 7.0, 1.702


def gather(table: Tensor, row_ids: Tensor) -> Tensor:
    """`table` [rows, ...], `row_ids` [count] int64, each below `rows` -> [count, ...]."""
    return table.index_select(0, row_ids)


def gather_axes(table: Tensor, row_ids: Tensor, axes: Tensor) -> Tensor:
    """`table` [rows, 2, columns], `row_ids` [count, 3] int64 -> [count, 2, columns]: each column from its axis's row.

    `axes` [columns] int32: which of a row's three ids each column has (M-RoPE; Wang et al., 2024, arXiv:2409.12191).
    """
    rows = row_ids[:, axes.long()].unsqueeze(1).expand(-1, 2, -1)
    return table.gather(0, rows)


def scatter(x: Tensor, row_ids: Tensor, table: Tensor) -> None:
    """Copy the rows of `x` [count, ...] to the rows `row_ids` [count] int64, all different, of `table` [rows, ...]."""
    table.index_copy_(0, row_ids, x)


def neighbours(x: Tensor, batch: Batch, width: int, columns: int) -> Tensor:
    """`x` [num_tokens, size] -> [num_tokens, columns]; see `Ops.neighbours`."""
    out, size = x.new_zeros(len(x), columns), x.shape[1]
    for first, last in itertools.pairwise(batch.column("query_start").tolist()):
        for place in range(width):
            shift = place - width // 2
            begin, end = max(first, first - shift), min(last, last - shift)
            if begin < end:
                out[begin:end, place * size : (place + 1) * size] = x[begin + shift : end + shift]
    return out


def copy_rows(table: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy rows of `table` [rows, ...] simultaneously: each pair is (source, target)."""
    sources, targets = torch.tensor(pairs, dtype=torch.int64).to(table.device).unbind(1)
    table.index_copy_(0, targets, table.index_select(0, sources))


def copy_columns(x: Tensor, out: Tensor, columns: Columns) -> None:
    """Copy columns of each row of `x` [rows, any] to columns of `out` [rows, any], converted to its dtype."""
    for head in range(columns.heads):
        first, to = columns.first + head * columns.step, columns.to + head * columns.to_step
        part = x[:, first : first + columns.count]
        if columns.paired:
            part = torch.cat((part[:, ::2], part[:, 1::2]), 1)
        out[:, to : to + columns.count] = part


_FUNCTIONS: dict[ElementActivation | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "clip": lambda x: x.clamp(-1.0, 1.0),
    "gelu": F.gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activate(
    x: Tensor,
    activation: ElementActivation | None,
    *,
    divisor: float = 1.0,
    factor: float = 1.0,
    alphas: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `ActivateOp`."""
    apply = _FUNCTIONS[activation] if alphas is None else partial(_xielu, alphas=alphas)
    return x.copy_(apply(x.float().div_(divisor)).mul_(factor))


def _xielu(x: Tensor, alphas: tuple[Tensor, Tensor]) -> Tensor:
    positive, negative = (F.softplus(alpha) for alpha in alphas)
    below = (x.clamp(max=-1e-6).expm1() - x) * (negative + 0.5)
    return torch.where(x > 0, positive * x * x, below) + 0.5 * x


def limit(x: Tensor, first: int, count: int, low: Tensor, high: Tensor) -> None:
    """Limit `count` columns of `x` [rows, any] from `first` on to `low` up to `high`, each [1] float32, in place."""
    x[:, first : first + count].clamp_(low.to(x.dtype), high.to(x.dtype))


def add_rows(x: Tensor, residual: Tensor, factor: float, *, total: Tensor | None = None) -> Tensor:
    """See `AddRowsOp`."""
    return residual.copy_(_sum(x, residual, factor, None, total))


def gate(x: Tensor, others: Tensor, first: int, activation: Activation) -> Tensor:
    """See `GateOp`."""
    return x.copy_(activate_gated(torch.cat((x, others[:, first : first + x.shape[1]]), -1), activation))


def activate_gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Gated linear units (Shazeer, 2020, arXiv:2002.05202).

    `gate_up` [num_tokens, 2 * size], gate first -> act(gate) * up [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_CLAMPED_SWIGLU_LIMIT), up.clamp(-_CLAMPED_SWIGLU_LIMIT, _CLAMPED_SWIGLU_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * _CLAMPED_SWIGLU_ALPHA))
    return apply_activation(gate, activation).mul_(up)


def apply_activation(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation without a gate to each element."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "relu2":
        return F.relu(x).square_()
    assert activation == "silu"
    return F.silu(x)


def mix_streams(
    x: Tensor, factors: Tensor, inputs: int, outputs: int, size: int, *, scale: Tensor | None = None
) -> Tensor:
    """See `MixStreamsOp`."""
    streams = x[:, : inputs * size].float().view(len(x), 1, inputs, size)
    by_stream = factors[:, : outputs * inputs].view(len(x), outputs, inputs, 1)
    mixed = (streams * by_stream).sum(2)
    return (mixed if scale is None else mixed * scale).flatten(1).to(x.dtype)


def match_magnitude(x: Tensor, like: Tensor, least: float) -> Tensor:
    """Scale each row of `x` [rows, columns] to the root mean square of the first columns of `like`; overwrites `x`."""
    wanted = like[:, : x.shape[1]].float().square().mean(1, keepdim=True).sqrt()
    found = x.float().square().mean(1, keepdim=True).clamp(min=least).sqrt()
    return x.copy_(x.float() * (wanted / found))


def keep_above(x: Tensor, deviations: float) -> Tensor:
    """max(0, x - mean - deviations * standard deviation) of each row [rows, columns]; overwrites `x`."""
    wide = x.float()
    mean = wide.mean(1, keepdim=True)
    spread = (wide - mean).square().mean(1, keepdim=True).sqrt()
    return x.copy_((wide - (mean + deviations * spread)).relu())


def head_gates(x: Tensor, query: Tensor, num_heads: int) -> Tensor:
    """Multiply each head of `x` [num_tokens, num_heads * head_dim] by the sigmoid of its gate; may overwrite `x`.

    `query` [num_tokens, ...] has `num_heads` queries of head_dim columns, each followed by its gate.
    """
    head_dim = x.shape[1] // num_heads
    gates = query[:, : 2 * x.shape[1]].view(len(x), num_heads, 2, head_dim)[:, :, 1]
    return x.mul_(gates.sigmoid().flatten(1))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None, groups: int = 1) -> Tensor:
    """See `RMSNormOp`; `x` [..., groups * size].

    Zhang and Sennrich, 2019, arXiv:1910.07467; with a bias, Ba et al., 2016, arXiv:1607.06450. The mean is computed in
    float32, and the result is rounded to the weight's dtype before the weight is applied, as in training.
    """
    wide = x.float() if groups == 1 else x.float().view(*x.shape[:-1], groups, -1)
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    normed = (wide * scale).to(weight.dtype).mul_(weight)
    if bias is not None:
        normed = normed.add_(bias)
    return normed.to(x.dtype).view(x.shape)


def rms_norm_columns(x: Tensor, first: int, weight: Tensor, eps: float) -> None:
    """Normalize the columns `first` to `first + len(weight)` of `x` in place."""
    columns = x[:, first : first + len(weight)]
    columns.copy_(rms_norm(columns, weight, eps))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    factor: float,
    *,
    bias: Tensor | None = None,
    after: NormWeight[Tensor] | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `AddRMSNormOp`."""
    stream = _sum(x, residual, factor, after, total)
    return rms_norm(stream, weight, eps, bias=bias), stream


def _sum(x: Tensor, residual: Tensor, factor: float, after: NormWeight[Tensor] | None, total: Tensor | None) -> Tensor:
    stream = torch.add(residual, x if after is None else rms_norm(x, after.weight, after.eps), alpha=factor)
    return stream if total is None else stream.mul_(total.to(stream.dtype))
