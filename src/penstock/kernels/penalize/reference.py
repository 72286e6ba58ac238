"""Penalties in plain torch."""

import functools
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def penalize(
    logits: Tensor,
    rows: NDArray[np.int64],
    penalties: NDArray[np.float64],
    tables: "Sequence[tuple[array[int], array[int], array[int]]]",
    *,
    undo: bool,
) -> Callable[[], object] | None:
    """See `penstock.kernels.penalize`."""
    columns = zip(*tables, strict=True)
    tokens, totals, answers = (np.frombuffer(b"".join(column), np.int32).astype(np.int64) for column in columns)
    owners = np.repeat(np.arange(len(rows)), [len(table[0]) for table in tables])
    repetition, frequency, presence, share = penalties[owners].T
    of_answer = np.where(answers > 0, frequency * answers + presence, 0.0).astype(np.float32)
    of_all = (share * totals).astype(np.float32)
    device = logits.device
    assert logits.is_contiguous()
    flat, index = logits.view(-1), torch.from_numpy(rows[owners] * logits.shape[-1] + tokens).to(device)
    before = flat[index]
    factor = torch.from_numpy(np.where(totals > 0, repetition, 1.0).astype(np.float32)).to(device)
    after = torch.where(before < 0, before * factor, before / factor)
    flat[index] = after - torch.from_numpy(of_answer).to(device) - torch.from_numpy(of_all).to(device)
    return functools.partial(flat.index_put_, (index,), before) if undo else None
