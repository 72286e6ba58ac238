"""Rows of a table, rows times a number, and the gated activation, in plain torch."""

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
