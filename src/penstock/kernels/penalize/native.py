"""Penalties by the native kernel, `csrc/penalize.cpp`."""

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock import native


@functools.cache
def _function() -> Callable[..., Any]:
    library = native.library()
    assert library is not None
    return library.function("penstock_penalize", "ppl")


def penalize(
    logits: Tensor,
    rows: NDArray[np.int64],
    penalties: NDArray[np.float64],
    tables: "Sequence[tuple[array[int], array[int], array[int]]]",
    *,
    undo: bool,
) -> Callable[[], object] | None:
    """See `penstock.kernels.penalize`."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    penalties = np.ascontiguousarray(penalties)
    lens = [len(table[0]) for table in tables]
    counted = np.zeros((len(rows), 6), np.int64)  # `CountedRow` in C++
    counted[:, 0] = logits.data_ptr() + rows * (logits.shape[-1] * 4)
    counted[:, 1:4] = [[column.buffer_info()[0] for column in table] for table in tables]
    counted[:, 4] = lens
    if undo:
        saved = np.empty(sum(lens), np.float32)
        counted[:, 5] = saved.__array_interface__["data"][0] + 4 * (np.cumsum(lens) - lens)
    _function()(counted.ctypes.data, penalties.ctypes.data, len(rows))
    return functools.partial(_put_back, logits, rows, tables, saved) if undo else None


def _put_back(
    logits: Tensor,
    rows: NDArray[np.int64],
    tables: "Sequence[tuple[array[int], array[int], array[int]]]",
    saved: NDArray[np.float32],
) -> None:
    tokens = np.frombuffer(b"".join(table[0] for table in tables), np.int32)
    places = np.repeat(rows * logits.shape[-1], [len(table[0]) for table in tables]) + tokens
    logits.view(-1)[torch.from_numpy(places)] = torch.from_numpy(saved)
