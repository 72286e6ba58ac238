"""Attention of a step's queries over the paged KV cache."""

from torch import Tensor

from penstock.kernels.kv_store import LayerCache, PackedCache
from penstock.kernels.kv_store.packed import PackedBatch
from penstock.kernels.paged_attention import native, reference
from penstock.kernels.paged_attention.batch import AttentionBatch, DecodeGroup, PromptChunk, build_batch

Batch = AttentionBatch | PackedBatch

__all__ = ["AttentionBatch", "Batch", "DecodeGroup", "PackedBatch", "PromptChunk", "build_batch", "paged_attention"]


def paged_attention(
    query: Tensor,
    num_heads: int,
    cache: LayerCache,
    batch: Batch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of each query over its own sequence.

    `query` [num_tokens, num_heads * head_dim or more]: queries are its first columns; `cache` already holds this step's
    keys and values. A query at position p sees the keys `p - sliding_window < k <= p`; scores are
    `soft_cap * tanh(score / soft_cap)` where there is a soft cap. Returns [num_tokens, num_heads * head_dim].
    """
    limits = (scale, sliding_window, soft_cap)
    if isinstance(cache, PackedCache):
        assert isinstance(batch, PackedBatch)
        return native.paged_attention(query, num_heads, cache, batch, *limits)
    assert isinstance(batch, AttentionBatch)
    return reference.paged_attention(query, num_heads, cache, batch, *limits)
