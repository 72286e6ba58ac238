"""Norms of heads, rotary positions and the KV cache, one after another in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.kv_store import ReferenceCache, store_kv
from penstock.kernels.rms_norm.reference import rms_norm
from penstock.kernels.rotary import apply_rotary


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of the queries and keys, before they are rotated."""

    query: Tensor
    """[head_dim], of the type of the activations; so is `key`."""
    key: Tensor
    eps: float


def rotate_and_store(
    qkv: Tensor, num_heads: int, norms: HeadNorms | None, angles: Tensor, slot_mapping: Tensor, cache: ReferenceCache
) -> Tensor:
    """See `penstock.kernels.rotary_store`; `slot_mapping` [num_tokens] int64."""
    kv_heads, head_dim = cache.key.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    cos, sin = angles.unbind(1)
    query, key, value = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query.copy_(rms_norm(query, norms.query, norms.eps))
        key.copy_(rms_norm(key, norms.key, norms.eps))
    apply_rotary(heads[:, : num_heads + kv_heads], cos, sin)
    store_kv(key, value, cache, slot_mapping)
    return qkv
