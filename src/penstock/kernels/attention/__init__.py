"""Attention over the paged KV cache: a layer's cache, and the operations that depend on its memory layout.

reference_cache   the cache as plain tensors; head norms, RoPE and cache writes in plain torch
reference         attention over it in plain torch
native            cache and operations of the native kernels, in the layout of `csrc/kv_layout.h`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.block_bytes import BlockBytes
    from penstock.native.array import AnyDtype


@dataclass(frozen=True, slots=True)
class HeadNorms(Generic[A]):
    """RMS norms of the query and key heads, applied before RoPE, or after it."""

    query: A
    """[head_dim], in the activations' dtype or float32; so is `key`."""
    key: A | None
    """None: the layer has no keys of its own."""
    eps: float
    last: bool = False
    """Whether they are applied after RoPE, whose cosines and sines must have no factor then."""


@dataclass(frozen=True, slots=True)
class RopeOptions(Generic[A]):
    """How a layer's queries and keys become those that attend and are cached."""

    num_heads: int
    """Number of query heads."""
    norms: HeadNorms[A] | None = None
    """None: no normalization."""
    parts: int = 3
    """Number of parts in the projection. 2: queries and keys; the values are the keys before their norm (for a latent
    cache: the keys as stored). 1: queries only; the cache belongs to another layer, and nothing is written."""
    value_norm: bool = False
    """Divide each value head by its root mean square, with the epsilon of `norms`."""
    gated: bool = False
    """Each query head is followed by a gate of the same size, which is left unchanged."""
    interleaved: bool = False
    """RoPE rotates adjacent elements; see `reference_cache`."""


BIAS_MARGIN = 16
"""Columns of a position bias that vector loads may read beyond those of all distances."""


@dataclass(frozen=True, slots=True)
class AttentionOptions(Generic[A]):
    """How a layer's queries attend to the cached keys."""

    num_heads: int
    """Number of query heads."""
    scale: float
    """Factor on the scores."""
    window: int | None = None
    """A query at position p attends to the keys p - window < k <= p; None: to all k <= p."""
    chunk: int | None = None
    """A query attends to the keys from the last multiple of `chunk` on."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    sinks: A | None = None
    """[num_heads] float32, the score of an additional key of each head, whose value is 0."""
    position_bias: A | None = None
    """[num_heads, 2 * n] float32, added to the scores by the distance of key and query: that of the key `d` after the
    query is in column n + d; n exceeds all distances by `BIAS_MARGIN`."""
    gated: bool = False
    """As in `RopeOptions`."""
    bidirectional: bool = False
    """Queries also attend to later keys, k < p + window; for texts computed whole."""
    takes_ends: bool = False
    """Queries attend to the keys up to their `Batch.seen_ends`, if the batch has them."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The parameters of a layer's cache."""

    num_blocks: int
    block_size: int
    num_heads: int
    """Number of KV heads."""
    head_dim: int
    dtype: AnyDtype
    """int8 has one scale per token and head."""
    device: str
    gather_limit: int
    """Most keys that the reference gathers at a time, unless a single sequence has more."""
    latent: bool = False
    """Whether the stored keys are also the values, so that the cache has no separate values (MLA)."""


class LayerCache(Protocol[A]):
    """The KV cache of one layer."""

    dtype: AnyDtype

    @property
    def nbytes(self) -> int:
        """Size in bytes, without padding."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks simultaneously; each pair is (source, target)."""
        ...

    def rope_and_cache(
        self,
        qkv: A,
        options: RopeOptions[A],
        angles: A | None,
        batch: Batch,
        *,
        query_factors: A | None = None,
    ) -> A:
        """Normalize queries and keys, apply RoPE, and write keys and values to the cache.

        Args:
            qkv: [num_tokens, columns], contiguous, may be overwritten: query heads, then the key heads and the value
                heads of the cache.
            angles: [num_tokens, 2, num_angles] float32: cosines, then sines, as in `apply_rotary`; None: no RoPE.
            query_factors: [num_tokens] float32, multiplied with the queries at the end.

        Returns the queries, in the first columns of a tensor with the shape of `qkv`.
        """
        ...

    def attend(self, query: A, options: AttentionOptions[A], batch: Batch) -> A:
        """Attention of each query over its own sequence, causal unless the options say otherwise.

        The cache already holds this step's keys and values. Returns [num_tokens, num_heads * head_dim].

        Args:
            query: [num_tokens, num_heads * head_dim or more], with the queries in the first columns.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerCaches(Generic[A]):
    """The KV caches of the layers of a cache group.

    They are initialized to zeros: a padded gather may read slots that were never written. Their weight is 0, but their
    content must be finite, because 0 * NaN is NaN.
    """

    layers: tuple[LayerCache[A], ...]
    back: Callable[[int], None]
    """Backs the first `num_blocks` blocks of all layers with physical memory; blocks are first used in ascending order.
    """
    blocks: BlockBytes
    """Access to the same memory as bytes of blocks."""
