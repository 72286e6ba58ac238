"""Random sequences with their keys and values in a paged cache of either layout, to be attended to in any division."""

import random
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention import BIAS_MARGIN, AttentionOptions, CacheShape, HeadNorms, RopeOptions
from penstock.kernels.attention.native import PackedCache
from penstock.kernels.attention.reference_cache import ReferenceCache
from penstock.kernels.batch import Batch
from tests.kernels.versions import REFERENCE, native_table

Part = tuple[int, int, int]
"""(sequence, first position, number of tokens)"""


@dataclass(frozen=True)
class Shape:
    """What a cache and the queries on it are made of."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Features:
    """What models have beside the usual."""

    angles: float | None = 1.0
    """The share of a head that is turned; None: positions turn nothing."""
    interleaved: bool = False
    gated: bool = False
    factors: bool = False
    sinks: bool = False
    norms: torch.dtype | None = None
    """Heads are normalised, with weights of this type."""
    norm_last: bool = False
    """They are normalised after they are turned."""
    value_norm: bool = False
    """Values, too, where keys are."""
    values_are_keys: bool = False
    chunk: int | None = None
    latent: bool = False
    """Values are the keys as they are kept."""
    bidirectional: bool = False
    """Of parts that are whole sequences."""
    biased: bool = False
    """Scores have a bias by the distance of key and query."""


class Sequences:
    """Sequences of the given lengths: what the projection gives for all their tokens, and scattered blocks.

    `put` and `attend` work on parts of them, in either layout; unused slots of the cache hold rubbish.
    """

    def __init__(
        self, shape: Shape, lengths: list[int], *, packed: bool, seed: int, features: Features | None = None
    ) -> None:
        self.shape, self._ops = shape, native_table() if packed else REFERENCE
        self.features = features = features or Features()
        self._parts = 2 if features.values_are_keys or features.latent else 3
        generator = torch.Generator().manual_seed(seed)
        columns = (shape.num_heads * (1 + features.gated) + (self._parts - 1) * shape.num_kv_heads) * shape.head_dim
        self.qkv = [torch.randn(length, columns, generator=generator).to(shape.dtype) for length in lengths]
        needed = [-(-length // shape.block_size) for length in lengths]
        blocks = random.Random(seed).sample(range(sum(needed) + 3), sum(needed))
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        self.norms: HeadNorms | None = None
        if features.norms is not None:
            query, key = (torch.rand(shape.head_dim, generator=generator) + 0.5 for _ in range(2))
            self.norms = HeadNorms(query.to(features.norms), key.to(features.norms), 1e-5, features.norm_last)
        pairs = int((features.angles or 0.0) * shape.head_dim) // 2
        self.angles = torch.randn(max(lengths), pairs, generator=generator)
        self.factors = torch.rand(max(lengths), 1, generator=generator) + 0.5
        self.sinks = 3 * torch.randn(shape.num_heads, generator=generator) if features.sinks else None
        distances = 2 * (max(lengths) + BIAS_MARGIN)
        self.bias = torch.randn(shape.num_heads, distances, generator=generator) if features.biased else None
        cache_shape = CacheShape(
            num_blocks=sum(needed) + 3,
            block_size=shape.block_size,
            num_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.cache_dtype,
            device=torch.device("cpu"),
            gather_limit=64,
            latent=features.latent,
        )
        (self.cache,) = self._ops.new_caches([cache_shape]).layers

    def put(self, parts: list[Part]) -> Tensor:
        """Store the parts' keys and values; returns what holds their queries."""
        qkv = torch.cat([self.qkv[seq][start : start + count] for seq, start, count in parts]).contiguous()
        phases = torch.cat([self.angles[start : start + count] for _, start, count in parts])
        angles = torch.stack((phases.cos(), phases.sin()), 1)
        factors = torch.cat([self.factors[start : start + count] for _, start, count in parts])
        features = self.features
        options = RopeOptions(
            self.shape.num_heads,
            self.norms,
            parts=self._parts,
            value_norm=features.value_norm and self.norms is not None and not features.latent,
            gated=features.gated,
            interleaved=features.interleaved,
        )
        return self.cache.rope_and_cache(
            qkv,
            options,
            None if features.angles is None else angles,
            self.batch(parts),
            query_factors=factors if features.factors else None,
        )

    def attend(self, parts: list[Part], window: int | None = None, cap: float | None = None) -> dict[int, Tensor]:
        """Store and attend: what each sequence of the parts gives, [tokens, num_heads * head_dim]."""
        query = self.put(parts)
        options = AttentionOptions(
            self.shape.num_heads,
            self.shape.head_dim**-0.5,
            window=window,
            chunk=self.features.chunk,
            soft_cap=cap,
            sinks=self.sinks,
            position_bias=self.bias,
            gated=self.features.gated,
            bidirectional=self.features.bidirectional,
        )
        out = self.cache.attend(query, options, self.batch(parts))
        counts = [count for _, _, count in parts]
        return dict(zip((seq for seq, _, _ in parts), out.split(counts), strict=True))

    def poison(self, block: int) -> None:
        """Let whatever reads this block get NaN."""
        if isinstance(self.cache, PackedCache):
            self.cache.blocks[block] = 255  # in each of the types that the layout has
        else:
            assert isinstance(self.cache, ReferenceCache)
            for tensor in (self.cache.key, self.cache.value, self.cache.key_scales, self.cache.value_scales):
                if tensor is not None and tensor.is_floating_point():
                    tensor[block] = torch.nan

    def batch(self, parts: list[Part]) -> Batch:
        starts, counts = [start for _, start, _ in parts], [count for _, _, count in parts]
        tables, ids = [array("i", self.tables[seq]) for seq, _, _ in parts], array("i", [0] * sum(counts))
        memory, pool_blocks = self._ops.lay_out(counts, starts, tables, ids, self.shape.block_size)
        return Batch(memory, len(parts), sum(counts), pool_blocks, torch.device("cpu"))


def random_division(rng: random.Random, lengths: list[int]) -> list[list[Part]]:
    """Steps that cover the sequences: chunks of any size, each step with any of them in any order."""
    done = [0] * len(lengths)
    steps = []
    while any(position < length for position, length in zip(done, lengths, strict=True)):
        step: list[Part] = []
        for seq in rng.sample(range(len(lengths)), len(lengths)):
            count = min(rng.choice((1, 1, 2, 5, 17, 64, 300)), lengths[seq] - done[seq])
            if count and rng.random() < 0.8:
                step.append((seq, done[seq], count))
                done[seq] += count
        if step:
            steps.append(step)
    return steps
