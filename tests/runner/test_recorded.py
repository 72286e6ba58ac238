from array import array
from pathlib import Path

import pytest
import torch

from penstock import native
from penstock.core.plan import SampleBatch, StepPlan
from penstock.kernels.kv_store import PackedCache
from penstock.models.registry import load_model
from penstock.runner.forward import Forward
from penstock.runner.inputs import build_inputs
from penstock.runner.kv_cache import KVCache
from penstock.runner.recorded import RecordedForward
from tests.stepping import settings_for

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
        packed = [[layer for layer in cache.layers if isinstance(layer, PackedCache)] for cache in caches]
        recorded, plain = RecordedForward(model, packed[0], 16, 4), Forward(model, packed[1])
        for step in STEPS:
            starts, counts = zip(*step, strict=True)
            tables = [array("i", range(4 * index, 4 * index + 4)) for index in range(len(step))]
            tokens = array("i", [7 * index % 50 for index in range(sum(counts))])
            # None, as many as there is memory for, and more, some of them twice.
            for rows in ([], [sum(counts) - 1], [0, 0, sum(counts) - 1, 0], [0] * 5):
                plan = StepPlan(list(counts), list(starts), tokens, tables, [], SampleBatch(rows=rows))
                inputs = build_inputs(plan, settings.memory.block_size, 0, torch.device("cpu"), packed=True)
                assert torch.equal(recorded(inputs), plain(inputs))
            for rows in ([sum(counts) - 1, 0], [0] * 7):
                chosen = torch.tensor(rows)
                assert torch.equal(recorded.logits(chosen), plain.logits(chosen))
        for left, right in zip(*packed, strict=True):
            assert (left.blocks == right.blocks).all()
    torch.set_num_threads(1)
