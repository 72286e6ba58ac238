import itertools
from array import array
from pathlib import Path

import pytest
import torch

from penstock import native
from penstock.kernels.kv_store import PackedCache
from penstock.models.registry import load_model
from penstock.runner.inputs import build_packed_inputs
from penstock.runner.kv_cache import KVCache
from penstock.runner.recorded import RecordedForward
from tests.stepping import plan_of, settings_for

STEPS = (((0, 5), (0, 1), (0, 7)), ((5, 1),), ((6, 1), (1, 1), (7, 1)), ((2, 4), (8, 2)))
"""(start, tokens) of each sequence; all the same block table is read by two of them."""


pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recorded_pass_gives_what_the_model_gives_bit_for_bit(tiny_llama: Path, threads: int) -> None:
    checkpoint, settings = settings_for(tiny_llama, dtype="bfloat16", max_num_batched_tokens=16, max_num_seqs=4)
    torch.set_num_threads(threads)
    with torch.inference_mode():
        model = load_model(checkpoint, settings)
        caches = [KVCache(model.config, settings) for _ in range(2)]
        recorded = RecordedForward(model, caches[0], 16, 4)
        for step in STEPS:
            counts = [count for _, count in step]
            tables = [array("i", range(4 * index, 4 * index + 4)) for index in range(len(step))]
            tokens = iter([7 * index % 50 for index in range(sum(counts))])
            parts = [(start, list(itertools.islice(tokens, count))) for start, count in step]
            # None, as many as there is memory for, and more, some of them twice.
            for rows in ([], [sum(counts) - 1], [0, 0, sum(counts) - 1, 0], [0] * 5):
                plan = plan_of(parts, tables, rows).forward
                inputs = build_packed_inputs(plan, tables, settings.memory.block_size)
                ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
                attended = model.attend(ids, positions, inputs.batch, caches[1].layers)
                assert torch.equal(
                    recorded(plan, tables), model.logits(*attended, torch.tensor(rows, dtype=torch.int64))
                )
            for rows in ([sum(counts) - 1, 0], [0] * 7):
                assert torch.equal(recorded.logits(rows), model.logits(*attended, torch.tensor(rows)))
        for left, right in zip(*(cache.layers for cache in caches), strict=True):
            assert isinstance(left, PackedCache)
            assert isinstance(right, PackedCache)
            assert (left.blocks == right.blocks).all()
    torch.set_num_threads(1)
