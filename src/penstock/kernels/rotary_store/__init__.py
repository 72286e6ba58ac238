"""Between the projection of queries, keys and values and attention: norms of heads, rotary positions, the KV cache."""

from torch import Tensor

from penstock.kernels.kv_store import LayerCache, PackedCache
from penstock.kernels.kv_store.packed import PackedBatch
from penstock.kernels.paged_attention import Batch
from penstock.kernels.paged_attention.batch import AttentionBatch
from penstock.kernels.rotary_store import native, reference
from penstock.kernels.rotary_store.reference import HeadNorms

__all__ = ["HeadNorms", "rotate_and_store"]


def rotate_and_store(
    qkv: Tensor, num_heads: int, norms: HeadNorms | None, angles: Tensor, batch: Batch, cache: LayerCache
) -> Tensor:
    """Normalise (where there are `norms`) and rotate queries and keys; store keys and values.

    `qkv` [num_tokens, heads * head_dim], contiguous, is given up: the `num_heads` of the queries, then as many heads of
    keys as the cache has, then those of values. `angles` [num_tokens, 2, angles] float32: cosines, then sines; as
    `apply_rotary` takes them. Returns the queries, in the first columns of a tensor like `qkv`.
    """
    if isinstance(cache, PackedCache):
        assert isinstance(batch, PackedBatch)
        return native.rotate_and_store(qkv, num_heads, norms, angles, batch, cache)
    assert isinstance(batch, AttentionBatch)
    return reference.rotate_and_store(qkv, num_heads, norms, angles, batch.slot_mapping, cache)
