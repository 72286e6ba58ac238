"""Paged attention against a formulation without pages, batches or grouped heads: one query and one head at a time."""

import math
import random
from array import array

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import AttentionOptions, CacheShape, reference
from penstock.kernels.attention.reference_cache import ReferenceCache
from penstock.kernels.batch import Batch
from penstock.system.allocator import Allocator
from tests.kernels.paged import Sequences, Shape, random_division
from tests.kernels.versions import REFERENCE, needs_native

BLOCK_SIZE = 4


def naive(
    query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int | None, cap: float | None
) -> Tensor:
    """Queries [queries, num_heads, head_dim] at positions `start` and on; keys [length, num_kv_heads, head_dim]."""
    out = torch.zeros(query.shape)
    share = query.shape[1] // keys.shape[1]
    for row in range(query.shape[0]):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            scores = (keys[first : position + 1, head // share] @ query[row, head]) * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            weights = torch.exp(scores - scores.max())
            out[row, head] = (weights / weights.sum()) @ values[first : position + 1, head // share]
    return out


class Case:
    """Random sequences with their keys in a cache, whose unused slots hold large rubbish."""

    def __init__(
        self, parts: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        self.parts = parts  # (start, query_len) of each sequence
        needed = [-(-(start + length) // BLOCK_SIZE) for start, length in parts]
        blocks = rng.sample(range(sum(needed) + 7), sum(needed))
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        shape = (sum(needed) + 7, BLOCK_SIZE, num_kv_heads, head_dim)
        self.cache = ReferenceCache(
            CacheShape(*shape, torch.float32, torch.device("cpu"), gather_limit=64), Allocator()
        )
        self.cache.key.fill_(1e3)
        self.cache.value.fill_(-1e3)
        self.query = torch.randn(sum(n for _, n in parts), num_heads, head_dim, generator=generator)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for (start, length), table in zip(parts, self.tables, strict=True):
            slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start + length)])
            for stored, cache in ((self.keys, self.cache.key), (self.values, self.cache.value)):
                content = torch.randn(start + length, num_kv_heads, head_dim, generator=generator)
                cache.view(-1, num_kv_heads, head_dim)[slots] = content
                stored.append(content)

    def batch(self) -> Batch:
        starts, lens = zip(*self.parts, strict=True)
        tables = [array("i", table) for table in self.tables]
        memory, _ = REFERENCE.lay_out(lens, starts, tables, array("i", [0] * sum(lens)), BLOCK_SIZE)
        return Batch(memory, len(lens), sum(lens), 0, torch.device("cpu"))

    def attend(self, scale: float, window: int | None = None, cap: float | None = None) -> Tensor:
        query, num_heads = self.query.flatten(1), self.query.shape[1]
        out = self.cache.attend(query, AttentionOptions(num_heads, scale, window=window, soft_cap=cap), self.batch())
        return out.view(self.query.shape)

    def expected(self, scale: float, window: int | None, cap: float | None) -> Tensor:
        rows = self.query.split([length for _, length in self.parts])
        return torch.cat(
            [
                naive(query, keys, values, start, scale, window, cap)
                for query, keys, values, (start, _) in zip(rows, self.keys, self.values, self.parts, strict=True)
            ]
        )


def random_parts(rng: random.Random) -> list[tuple[int, int]]:
    starts = [rng.choice((0, 0, 1, 3, 4, 15, 16, rng.randrange(40))) for _ in range(rng.randrange(1, 7))]
    return [(start, rng.choice((1, 1, 1, 2, 4, rng.randrange(1, 20)))) for start in starts]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_random_ragged_batches_match_one_query_at_a_time(
    heads: tuple[int, int], window: int | None, cap: float | None
) -> None:
    rng = random.Random(f"{heads}{window}{cap}")
    for seed in range(6):
        case = Case(random_parts(rng), *heads, head_dim=rng.choice((3, 8, 16)), seed=seed)
        out = case.attend(0.4, window, cap)
        torch.testing.assert_close(out, case.expected(0.4, window, cap), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_long_prompt_cut_to_bound_its_scores_gives_the_same(
    cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "MAX_SCORES", 100)
    for window in (None, 4):
        case = Case([(11, 30), (0, 25)], 4, 2, 8, seed=3)
        out = case.attend(0.3, window, cap)
        torch.testing.assert_close(out, case.expected(0.3, window, cap), atol=2e-5, rtol=1e-5)


def test_decodes_are_gathered_in_groups_within_the_limit() -> None:
    case = Case([(length, 1) for length in (30, 2, 17, 29, 8, 3)], 2, 1, 8, seed=0)
    groups = reference.plan_attention(case.batch(), BLOCK_SIZE, 64, reference.Seen()).decodes
    assert [group.rows.tolist() for group in groups] == [[0, 3], [2, 4, 5], [1]]
    assert [group.most_keys for group in groups] == [31, 18, 3]
    for group in groups:
        assert math.prod(group.block_table.shape) * BLOCK_SIZE <= 64


def test_queries_may_be_the_first_columns_of_a_fused_projection() -> None:
    case = Case([(5, 6), (9, 1), (3, 1)], 4, 2, 8, seed=1)
    fused = torch.cat([case.query.flatten(1), torch.randn(len(case.query), 4 * 8)], dim=1)
    out = case.cache.attend(fused, AttentionOptions(4, 0.3), case.batch())
    torch.testing.assert_close(out, case.expected(0.3, None, None).flatten(1), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    case = Case([(5, 6), (9, 1), (3, 1)], 4, 2, 16, seed=1)
    expected = case.expected(0.25, None, None)
    case.query, case.cache.key, case.cache.value = (
        tensor.to(dtype) for tensor in (case.query, case.cache.key, case.cache.value)
    )
    out = case.attend(0.25)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_native)], ids=["reference", "native"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8], ids=str)
def test_blocks_behind_the_window_are_never_read(packed: bool, cache_dtype: torch.dtype) -> None:
    """They were given back, and may hold another sequence's keys, or NaN."""
    shape = Shape(4, 2, 16, 4, cache_dtype=cache_dtype)
    rng = random.Random(0)
    for window in (1, 3, 4, 9, 30):
        lengths = [rng.randrange(1, 70) for _ in range(4)]
        plain, poisoned = (Sequences(shape, lengths, packed=packed, seed=window) for _ in range(2))
        poison = min(set(range(1 + sum(map(len, plain.tables)))).difference(*plain.tables))
        poisoned.poison(poison)
        for step in random_division(rng, lengths):
            for seq, start, _ in step:
                behind = max(0, start - window + 1) // shape.block_size
                poisoned.tables[seq][:behind] = [poison] * behind
            expected, found = plain.attend(step, window), poisoned.attend(step, window)
            assert all(torch.equal(expected[seq], found[seq]) for seq in expected)
