"""The likeliest tokens in plain torch."""

import torch
from torch import Tensor

from penstock.kernels.draw.reference import token_weights


def leading(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `penstock.kernels.leading`."""
    top = logits.amax(-1, keepdim=True)
    total = token_weights(logits, top, torch.ones_like(top)).sum(-1)
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    return top.squeeze(-1), total, ordered[:, :k], token_ids[:, :k]
