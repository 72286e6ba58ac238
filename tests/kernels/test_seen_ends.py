"""Attention in which the tokens of an image also see its later ones, against one query at a time."""

from array import array

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import AttentionOptions, CacheShape, LayerCache, RopeOptions
from penstock.kernels.batch import Batch
from penstock.kernels.ops import Ops
from tests.kernels.versions import VERSIONS

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 4
LENGTH = 660
IMAGES = ((5, 37), (40, 41), (480, 600), (640, 650))
TEXT = 30


def ends_of(first: int, last: int) -> list[int]:
    ends = list(range(first + 1, last + 1))
    for begin, end in IMAGES:
        for index in range(max(first, begin), min(last, end)):
            ends[index - first] = end
    return ends


def attend(
    ops: Ops, cache: LayerCache, rows: dict[int, Tensor], starts: dict[int, int], window: int | None
) -> dict[int, Tensor]:
    """Store and attend, in one step, some rows of two sequences; only the first has images."""
    counts = [len(part) for part in rows.values()]
    tables = [array("i", range(1 + 300 * seq, 290 + 300 * seq)) for seq in rows]
    ids = array("i", [0] * sum(counts))
    memory, blocks = ops.lay_out(counts, [starts[seq] for seq in rows], tables, ids, BLOCK)
    ends = [
        end
        for seq, part in rows.items()
        for end in (
            ends_of(starts[0], starts[0] + len(part))
            if seq == 0
            else range(starts[seq] + 1, starts[seq] + len(part) + 1)
        )
    ]
    batch = Batch(memory, len(rows), sum(counts), blocks, "cpu", seen_ends=np.array(ends, np.int32))
    query = cache.rope_and_cache(torch.cat([*rows.values()]).clone(), RopeOptions(HEADS), None, batch)
    out = cache.attend(query, AttentionOptions(HEADS, SIZE**-0.5, window=window, takes_ends=True), batch)
    return dict(zip(rows, out.split(counts), strict=True))


def expected(rows: Tensor, ends: list[int], window: int | None) -> Tensor:
    query, key, value = rows.view(len(rows), -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], 1)
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
    places, until = torch.arange(len(rows)), torch.tensor(ends)
    seen = places < until[:, None]
    if window is not None:
        seen &= places > places[:, None] - window
    scores = torch.einsum("qhd,khd->hqk", query, key) * SIZE**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("window", [None, 70])
def test_an_images_tokens_see_all_of_it_in_any_chunks_that_do_not_cut_it(ops: Ops, window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    columns = (HEADS + 2 * KV_HEADS) * SIZE
    long, text = (torch.randn(count, columns, generator=generator) for count in (LENGTH, TEXT))
    shape = CacheShape(620, BLOCK, KV_HEADS, SIZE, ops.dtype("float32"), "cpu", 4096)
    whole = attend(ops, ops.new_caches([shape]).layers[0], {0: long, 1: text}, {0: 0, 1: 0}, window)
    torch.testing.assert_close(whole[0], expected(long, ends_of(0, LENGTH), window), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(whole[1], expected(text, list(range(1, TEXT + 1)), window), atol=2e-5, rtol=1e-5)
    cache, parts = ops.new_caches([shape]).layers[0], []
    for first, last in ((0, 3), (3, 40), (40, 41), (41, 480), (480, 658), (658, 659), (659, LENGTH)):
        parts.append(attend(ops, cache, {0: long[first:last]}, {0: first}, window)[0])
    torch.testing.assert_close(torch.cat(parts), whole[0], atol=2e-6 if ops.library is None else 0, rtol=0)
