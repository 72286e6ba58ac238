"""DoRA (Liu et al., 2024, arXiv:2402.09353): the factors of a weight's rows, from an adapter's magnitudes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config.weight_formats import FLOAT
from penstock.kernels.array_types import A
from penstock.kernels.linear.joined import weight_of_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.kernels.ops import Ops
    from penstock.quantization.adapted import AdaptedRows

_ROWS = 512
"""Rows computed at a time."""


def dora_factors(
    magnitudes: NDArray[np.float64],
    scale: float,
    a: NDArray[Any],
    b: NDArray[Any],
    target: AdaptedRows[A],
    ops: Ops[A],
    device: str,
) -> NDArray[np.float32]:
    """magnitude / |W + scale * B A| of each row: an adapter's output is factor * (W x + scale * B (A x)).

    W is the weight that the model computes with, dequantized if necessary.

    Args:
        magnitudes: [rows]
        a, b: [rank, columns] and [rows, rank].
        target: where the rows are in the model.
    """
    rank, columns = a.shape
    product = ops.new_weight(columns, rank, FLOAT, gated=False, dtype=ops.dtype("float32"), device=device)
    ops.store(product, 0, np.ascontiguousarray(a.T, np.float32))
    weight, first = weight_of_row(target.weight, target.first)
    norms = np.empty(len(b))
    for row in range(0, len(b), _ROWS):
        part = np.ascontiguousarray(b[row : row + _ROWS], np.float32)
        ids = np.arange(first + row, first + row + len(part), dtype=np.int64)
        update = product.linear(ops.constant(part, None, device), None, ops.dtype("float32"))
        found = weight.lookup(ops.constant(ids, None, device))
        total = ops.on_host(found).astype(np.float64) + scale * ops.on_host(update).astype(np.float64)
        norms[row : row + len(part)] = np.sqrt((total * total).sum(1))
    with np.errstate(all="ignore"):  # a row of zeros
        return (magnitudes / norms).astype(np.float32)
