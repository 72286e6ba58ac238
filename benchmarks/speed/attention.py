"""How near the native attention comes to the machine's ceilings, for each type of KV cache.

    python -m benchmarks.speed.attention      (writes results/<machine>/attention.json)

Heads are qwen3-0.6b's: 16 of queries, 8 of keys, 128 wide; blocks of 32 tokens, scattered. Decodes read their cache
once, so their figure is bytes a second over the measured read bandwidth; where sequences have a beginning in common, as
if each read it for itself. A prompt's is operations a second, 4 a pair of query and key and element, over the measured
rate of float32, or of bfloat16 where the processor multiplies it. Medians of rounds, each with ceilings measured anew.
"""

import json
import os
import random
import statistics
import sys
import time
from array import array
from collections import defaultdict

import torch

from benchmarks.report import save
from benchmarks.speed.ceilings import measure
from penstock import native
from penstock.core.plan import ForwardPlan, NewBlocks
from penstock.kernels.attention import AttentionOptions, CacheShape, LayerCache, RopeOptions
from penstock.kernels.reference_ops import over_tensors
from penstock.kernels.tables import make_ops
from penstock.runner.forward import build_batch

HEADS, KV_HEADS, WIDTH, BLOCK = 16, 8, 128, 32
CACHES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
CASES: dict[str, list[tuple[int, int]]] = {  # (first position, tokens) of each sequence
    "decode 64 x 512": [(511, 1)] * 64,
    "decode 32 x 512, 384 in common": [(511, 1)] * 32,
    "decode 1 x 16384": [(16383, 1)],
    "prompt of 512": [(0, 512)],
    "prompt of 2048, its last 256": [(1792, 256)],
}

CPU = "cpu"
OPS = over_tensors(make_ops(CPU))
COMMON = {"decode 32 x 512, 384 in common": 384}


def plan(parts: list[tuple[int, int]], seed: int, common: int = 0) -> "tuple[ForwardPlan, list[array[int]]]":
    """The parts' tokens and block tables.

    Each sequence's blocks are scattered over the pool, but for `common` tokens of the first's.
    """
    needed = [-(-(start + count) // BLOCK) for start, count in parts]
    blocks = list(range(sum(needed)))
    random.Random(seed).shuffle(blocks)
    tables = [array("i", [blocks.pop() for _ in range(count)]) for count in needed]
    for table in tables:
        table[: common // BLOCK] = tables[0][: common // BLOCK]
    counts, starts = [count for _, count in parts], [start for start, _ in parts]
    slots = list(range(len(parts)))
    new = [NewBlocks(0, slot, 0, table) for slot, table in enumerate(tables)]
    return ForwardPlan(counts, starts, array("i", [0] * sum(counts)), slots, new, [], []), tables


def filled_cache(parts: list[tuple[int, int]], dtype: torch.dtype) -> LayerCache:
    """A cache with random keys and values at all positions of the parts' sequences."""
    whole = [(0, start + count) for start, count in parts]
    num_blocks = sum(-(-length // BLOCK) for _, length in whole)
    shape = CacheShape(num_blocks, BLOCK, KV_HEADS, WIDTH, dtype, CPU, gather_limit=0)
    (cache,) = OPS.new_caches([shape]).layers
    batch = build_batch(*plan(whole, seed=0), BLOCK, OPS, CPU)
    qkv = torch.randn(batch.num_tokens, (HEADS + 2 * KV_HEADS) * WIDTH).bfloat16()
    angles = torch.cat([torch.ones(len(qkv), 1, WIDTH // 2), torch.zeros(len(qkv), 1, WIDTH // 2)], 1)
    cache.rope_and_cache(qkv, RopeOptions(HEADS), angles, batch)
    return cache


def rate(case: str, cache: LayerCache) -> float:
    """Bytes a second of decodes, operations a second of prompts: the best of several calls."""
    parts = CASES[case]
    batch = build_batch(*plan(parts, 0, COMMON.get(case, 0)), BLOCK, OPS, CPU)
    query = torch.randn(batch.num_tokens, HEADS * WIDTH).bfloat16()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        cache.attend(query, AttentionOptions(HEADS, WIDTH**-0.5), batch)
        best = min(best, time.perf_counter() - start)
    if all(count == 1 for _, count in parts):
        return cache.nbytes / best
    pairs = sum(position + 1 for start, count in parts for position in range(start, start + count))
    return 4 * HEADS * WIDTH * pairs / best


def main() -> int:
    threads = len(os.sched_getaffinity(0))
    native.set_num_threads(threads)
    rates: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    caches = {(name, case): filled_cache(CASES[case], dtype) for name, dtype in CACHES.items() for case in CASES}
    for _ in range(3):
        ceilings = measure(threads)
        for (name, case), cache in caches.items():
            achieved = rate(case, cache)
            pairs = "bfloat16" if name != "float32" and "bfloat16" in ceilings else "float32"  # as the queries are
            ceiling = ceilings["read" if case.startswith("decode") else pairs]
            rates[f"{name}, {case}"].append(achieved / 1e9)
            shares[f"{name}, {case}"].append(achieved / ceiling)
    result = {
        "GB/s of decodes, G operations/s of prompts": {n: round(statistics.median(r), 1) for n, r in rates.items()},
        "share of the ceiling": {n: round(statistics.median(s), 2) for n, s in shares.items()},
    }
    save("attention", result)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
