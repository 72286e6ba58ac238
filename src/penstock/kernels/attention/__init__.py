"""Attention over the paged KV cache: a layer's cache, and the operations that its memory layout asks for.

reference_cache   the cache as plain tensors; norms, rotary positions and the store in plain torch
reference         attention over it
native            cache and operations of the native kernels, in the layout that `csrc/kv_layout.h` draws
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.block_bytes import BlockBytes


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of the queries and keys, before they are rotated."""

    query: Tensor
    """[head_dim], of the type of the activations or float32; so is `key`."""
    key: Tensor | None
    """None: there are no keys to normalise."""
    eps: float


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a layer's cache is made of."""

    num_blocks: int
    block_size: int
    num_heads: int
    """Of keys."""
    head_dim: int
    dtype: torch.dtype
    """May be int8, with a scale for each token and head."""
    device: torch.device
    gather_limit: int
    """Most keys that the reference gathers at one time, unless a single sequence has more."""
    latent: bool = False
    """The values are the keys as they are kept: there are no others."""


class LayerCache(Protocol):
    """One layer's keys and values."""

    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Memory that it takes, but for padding."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, all at once: each pair is (from, to)."""
        ...

    def rope_and_cache(
        self,
        qkv: Tensor,
        num_heads: int,
        norms: HeadNorms | None,
        angles: Tensor | None,
        batch: Batch,
        *,
        gated: bool = False,
        interleaved: bool = False,
        query_factors: Tensor | None = None,
        parts: int = 3,
        value_norm: bool = False,
    ) -> Tensor:
        """Normalise (where there are `norms`) and rotate queries and keys; store keys and values.

        Args:
            qkv: [num_tokens, columns], contiguous, is given up: the `num_heads` of the queries, then as many heads of
                keys as the cache has, then those of values.
            parts: how many of these there are: 2 where values are the keys as they come, before their norm (of a latent
                cache: as they are kept); 1 where the cache is another layer's, and nothing is stored.
            value_norm: each head of the values is divided by its root mean square, with the epsilon of `norms`.
            angles: [num_tokens, 2, angles] float32: cosines, then sines, as `apply_rotary` takes them; None: positions
                turn nothing.
            gated: each head of the queries has a gate behind it, as long as itself, which stays as it is.
            interleaved: pairs lie beside each other, as `apply_rotary` draws.
            query_factors: [num_tokens] float32, by which the queries are multiplied in the end.

        Returns the queries, in the first columns of a tensor like `qkv`.
        """
        ...

    def attend(
        self,
        query: Tensor,
        num_heads: int,
        batch: Batch,
        *,
        scale: float,
        sliding_window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        gated: bool = False,
        bidirectional: bool = False,
    ) -> Tensor:
        """Attention of each query over its own sequence, causal unless it is `bidirectional`.

        `query` [num_tokens, num_heads * head_dim or more]: queries are its first columns, `gated` as `rope_and_cache`
        takes them; the cache already holds this step's keys and values. A query at position p sees the keys
        `p - sliding_window < k <= p`, or those from the last multiple of `chunk` on; if `bidirectional` also those
        `k < p + sliding_window`, of texts that are whole in the step. Scores are
        `soft_cap * tanh(score / soft_cap)` where there is a soft cap. `sinks` [num_heads] float32 are scores of one
        key more for each head, whose value is 0. Returns [num_tokens, num_heads * head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The caches of the layers of a group.

    They start as zeros: a padded gather may touch a slot that was never written, whose weight is 0 but whose content
    must then be a number, as 0 times NaN is NaN.
    """

    layers: tuple[LayerCache, ...]
    back: Callable[[int], None]
    """Has memory ready for so many of the first blocks of all layers; they are first used in ascending order."""
    blocks: BlockBytes
    """The same memory, block by block."""
