"""The likeliest token by the native kernel, `csrc/argmax.cpp`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock import native


@functools.cache
def _function() -> Callable[..., Any]:
    library = native.library()
    assert library is not None
    return library.function("penstock_argmax", "pllp")


def argmax(logits: Tensor) -> Tensor:
    """See `penstock.kernels.argmax`."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    rows, columns = logits.shape
    places = torch.empty(rows, dtype=torch.int64)
    _function()(logits.data_ptr(), rows, columns, places.data_ptr())
    return places
