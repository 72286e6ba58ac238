"""Disentangled attention: within whole texts, with terms of the scores that depend on content and distance."""

from __future__ import annotations

from typing import Generic

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A


@dataclass(frozen=True, slots=True)
class DisentangledOptions(Generic[A]):
    """How a layer's tokens attend to those of their text (DeBERTa; He et al., 2021, arXiv:2006.03654).

    score(query i, key j) = scale * (q_i k_j + q_i K_b + k_j Q_b), where b is the bucket of the distance i - j
    """

    num_heads: int
    scale: float
    keys: A | None
    """K [num_heads, head_dim, num_buckets] float32; the number of buckets is a multiple of 16. None: no such term."""
    queries: A | None
    """Q, likewise."""
    buckets: A
    """[2 * n] int32, ascending: that of a query `d` after its key at n + d; n is at least the longest text."""
