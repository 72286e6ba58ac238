"""Masks in plain torch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def mask(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
    """See `penstock.kernels.mask`."""
    words = torch.from_numpy(bits).to(logits.device)
    allowed = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    place = torch.from_numpy(rows).to(logits.device)
    logits[place] = logits[place].masked_fill(allowed.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)
