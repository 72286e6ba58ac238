import itertools
from array import array
from pathlib import Path

import pytest
import torch

from penstock.kernels.attention.native import PackedCache
from penstock.models.registry import load_model
from penstock.runner.forward import EagerForward, KVCache, RecordedForward
from tests.kernels.versions import LIBRARY, native_table, needs_native
from tests.stepping import kept, plan_of, settings_for

STEPS = (((0, 5), (0, 1), (0, 7)), ((5, 1),), ((6, 1), (1, 1), (7, 1)), ((2, 4), (8, 2)))
"""(start, tokens) of each sequence; all the same block table is read by two of them."""


pytestmark = needs_native


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recorded_pass_gives_what_the_model_gives_bit_for_bit(tiny_llama: Path, threads: int) -> None:
    checkpoint, settings = settings_for(tiny_llama, dtype="bfloat16", max_num_batched_tokens=16, max_num_seqs=4)
    torch.set_num_threads(threads)
    ops, cpu = native_table(), torch.device("cpu")
    assert LIBRARY is not None
    with torch.inference_mode():
        model = load_model(checkpoint, settings, ops)
        caches = [KVCache(model.spec, settings, ops) for _ in range(2)]
        recorded = RecordedForward(model, caches[0], ops, LIBRARY, 16, 4)
        eager = EagerForward(model, caches[1], ops, cpu)
        for step in STEPS:
            counts = [count for _, count in step]
            tables = [array("i", range(4 * index, 4 * index + 4)) for index in range(len(step))]
            tokens = iter([7 * index % 50 for index in range(sum(counts))])
            parts = [(start, list(itertools.islice(tokens, count))) for start, count in step]
            # None, as many as there is memory for, and more, some of them twice.
            for rows in ([], [sum(counts) - 1], [0, 0, sum(counts) - 1, 0], [0] * 5):
                plan = plan_of(parts, tables, rows).forward
                assert torch.equal(recorded(plan, [tables]), eager(plan, [tables]))
            for rows in ([sum(counts) - 1, 0], [0] * 7):
                assert torch.equal(recorded.logits(rows), eager.logits(rows))
        for left, right in zip(*(kept(cache) for cache in caches), strict=True):
            assert isinstance(left, PackedCache)
            assert isinstance(right, PackedCache)
            assert (left.blocks == right.blocks).all()
    torch.set_num_threads(1)
