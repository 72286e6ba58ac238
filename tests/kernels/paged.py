"""Random sequences with their keys and values in a paged cache of either layout, to be attended to in any division."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.kv_store import LayerCache, new_caches
from penstock.kernels.paged_attention import Batch, PackedBatch, build_batch, paged_attention
from penstock.kernels.paged_attention.batch import BatchOnHost
from penstock.kernels.rotary_store import HeadNorms, rotate_and_store

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


class Sequences:
    """Sequences of the given lengths: what the projection gives for all their tokens, and scattered blocks.

    `put` and `attend` work on parts of them, in either layout; unused slots of the cache hold rubbish.
    """

    def __init__(self, shape: Shape, lengths: list[int], *, packed: bool, seed: int, norms: bool = False) -> None:
        self.shape, self.packed = shape, packed
        generator = torch.Generator().manual_seed(seed)
        columns = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = [torch.randn(length, columns, generator=generator).to(shape.dtype) for length in lengths]
        needed = [-(-length // shape.block_size) for length in lengths]
        blocks = random.Random(seed).sample(range(sum(needed) + 3), sum(needed))
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        self.norms: HeadNorms | None = None
        if norms:
            query, key = (torch.rand(shape.head_dim, generator=generator) + 0.5 for _ in range(2))
            self.norms = HeadNorms(query.to(shape.dtype), key.to(shape.dtype), 1e-5)
        self.angles = torch.randn(max(lengths), shape.head_dim // 2, generator=generator)
        self.cache: LayerCache
        (self.cache,) = new_caches(
            1,
            sum(needed) + 3,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
            shape.cache_dtype,
            torch.device("cpu"),
            packed=packed,
        )

    def put(self, parts: list[Part]) -> Tensor:
        """Store the parts' keys and values; returns what holds their queries."""
        qkv = torch.cat([self.qkv[seq][start : start + count] for seq, start, count in parts]).contiguous()
        phases = torch.cat([self.angles[start : start + count] for _, start, count in parts])
        angles = torch.stack((phases.cos(), phases.sin()), 1)
        return rotate_and_store(qkv, self.shape.num_heads, self.norms, angles, self.batch(parts), self.cache)

    def attend(self, parts: list[Part], window: int | None = None, cap: float | None = None) -> dict[int, Tensor]:
        """Store and attend: what each sequence of the parts gives, [tokens, num_heads * head_dim]."""
        query = self.put(parts)
        out = paged_attention(
            query,
            self.shape.num_heads,
            self.cache,
            self.batch(parts),
            scale=self.shape.head_dim**-0.5,
            sliding_window=window,
            soft_cap=cap,
        )
        counts = [count for _, _, count in parts]
        return dict(zip((seq for seq, _, _ in parts), out.split(counts), strict=True))

    def batch(self, parts: list[Part]) -> Batch:
        size = self.shape.block_size
        host = BatchOnHost.of(np.array([count for _, _, count in parts]), np.array([start for _, start, _ in parts]))
        width = max(len(self.tables[seq]) for seq, _, _ in parts)
        tables = np.array([self.tables[seq] + [0] * (width - len(self.tables[seq])) for seq, _, _ in parts])
        slots = np.array(
            [
                self.tables[seq][position // size] * size + position % size
                for seq, start, count in parts
                for position in range(start, start + count)
            ]
        )
        if self.packed:
            memory = np.concatenate((host.query_start, host.seq_lens, tables.reshape(-1), slots))
            return PackedBatch(memory, len(slots), len(parts), width)
        return build_batch(
            host,
            torch.from_numpy(host.query_start),
            torch.from_numpy(host.seq_lens),
            torch.from_numpy(tables),
            torch.from_numpy(slots),
            torch.from_numpy(host.decode_order()),
            block_size=size,
            gather_limit=64,
        )


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
