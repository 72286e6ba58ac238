"""The likeliest tokens by the native kernel, `csrc/sampling.cpp`."""

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
    return library.function("penstock_leading", "plllpppp")


def leading(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `penstock.kernels.leading`."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    assert k <= vocab
    tops, totals = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    values, token_ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
    _function()(
        logits.data_ptr(),
        rows,
        vocab,
        k,
        tops.data_ptr(),
        totals.data_ptr(),
        values.data_ptr(),
        token_ids.data_ptr(),
    )
    return tops, totals, values, token_ids
