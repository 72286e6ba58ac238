"""Attention over the paged KV cache, as a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.kv_store import store_kv
from penstock.kernels.paged_attention import AttentionBatch, paged_attention
from penstock.layers.linear import Linear
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary
from penstock.quantization.base import Storage


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share of the KV cache; each tensor [num_blocks, block_size, num_kv_heads, head_dim]."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one attention layer is made of."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """On the scores: usually `head_dim ** -0.5`."""
    sliding_window: int | None
    qkv_bias: bool
    output_bias: bool
    qk_norm_eps: float | None
    """Normalise each head of the queries and keys with this epsilon; None: do not."""


class Attention:
    """Projects, rotates, stores the new keys and values, attends, projects back."""

    def __init__(self, shape: AttentionShape, storage: Storage) -> None:
        self.shape = shape
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv = Linear(shape.hidden_size, (query_size, kv_size, kv_size), storage, bias=shape.qkv_bias)
        self.output = Linear(query_size, (shape.hidden_size,), storage, bias=shape.output_bias)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if shape.qk_norm_eps is not None:
            self.query_norm = RMSNorm(shape.head_dim, shape.qk_norm_eps, storage)
            self.key_norm = RMSNorm(shape.head_dim, shape.qk_norm_eps, storage)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], batch: AttentionBatch, cache: LayerCache) -> Tensor:
        """`x` [num_tokens, hidden_size] -> the same shape; this step's keys and values are in `cache` then."""
        shape = self.shape
        heads = self.qkv(x).view(len(x), -1, shape.head_dim)  # [num_tokens, query, key and value heads, head_dim]
        query, key, value = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
            Rotary.rotate(query, angles)
            Rotary.rotate(key, angles)
        else:
            Rotary.rotate(heads[:, : shape.num_heads + shape.num_kv_heads], angles)
        store_kv(key, value, cache.key, cache.value, batch.slot_mapping)
        attended = paged_attention(
            query, cache.key, cache.value, batch, scale=shape.scale, sliding_window=shape.sliding_window
        )
        return self.output(attended.view(len(x), -1))
