"""Masks by the native kernel, `csrc/sampling.cpp`."""

import functools
from collections.abc import Callable
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
    return library.function("penstock_mask", "plplp")


def mask(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
    """See `penstock.kernels.mask`."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    rows, bits = np.ascontiguousarray(rows), np.ascontiguousarray(bits)
    _function()(logits.data_ptr(), logits.shape[-1], rows.ctypes.data, len(rows), bits.ctypes.data)
