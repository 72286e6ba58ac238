"""A token for each row by the native kernel, `csrc/sampling.cpp`."""

import ctypes
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
    return library.function("penstock_draw", "pllpp", ctypes.c_int32)


def draw(logits: Tensor, controls: NDArray[np.float64]) -> Tensor:
    """See `penstock.kernels.draw`; `controls` [rows, 6], a column for each field of `Controls`."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert controls.flags.c_contiguous
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    if _function()(logits.data_ptr(), rows, vocab, controls.ctypes.data, tokens.data_ptr()):
        raise MemoryError(f"no memory to sample from {vocab} tokens")
    return tokens
