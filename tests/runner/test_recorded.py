import itertools
from array import array
from pathlib import Path

import pytest

from penstock import native
from penstock.kernels.attention.native import PackedCache
from penstock.kernels.ops import native_ops
from penstock.models.registry import load_model
from penstock.runner.forward import EagerForward, KVCache, RecordedForward
from tests.support.checkpoints import write_random
from tests.support.families import CASES, SHAPE
from tests.support.needs import LIBRARY, needs_native
from tests.support.stepping import kept, plan_of, settings_for

STEPS = (((0, 5), (0, 1), (0, 7)), ((5, 1),), ((6, 1), (1, 1), (7, 1)), ((2, 4), (8, 2)))
"""(start, tokens) of each sequence; all the same block table is read by two of them."""


pytestmark = needs_native


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recorded_pass_gives_what_the_model_gives_bit_for_bit(tiny_llama: Path, threads: int) -> None:
    checkpoint, settings = settings_for(tiny_llama, dtype="bfloat16", max_num_batched_tokens=16, max_num_seqs=4)
    native.set_num_threads(threads)
    assert LIBRARY is not None
    ops = native_ops(LIBRARY)
    model = load_model(checkpoint, settings, ops)
    caches = [KVCache.of_model(model.spec, settings, ops) for _ in range(2)]
    recorded = RecordedForward(model, caches[0], ops, LIBRARY, 16, 4)
    eager = EagerForward(model, caches[1], ops, "cpu")
    for step in STEPS:
        counts = [count for _, count in step]
        tables = [array("i", range(4 * index, 4 * index + 4)) for index in range(len(step))]
        tokens = iter([7 * index % 50 for index in range(sum(counts))])
        parts = [(start, list(itertools.islice(tokens, count))) for start, count in step]
        # None, as many as there is memory for, and more, some of them twice.
        for rows in ([], [sum(counts) - 1], [0, 0, sum(counts) - 1, 0], [0] * 5):
            plan = plan_of(parts, tables, rows).forward
            assert (recorded.run(plan, [tables]).numpy() == eager.run(plan, [tables]).numpy()).all()
        for rows in ([sum(counts) - 1, 0], [0] * 7):
            assert (recorded.logits(rows).numpy() == eager.logits(rows).numpy()).all()
    for left, right in zip(*(kept(cache) for cache in caches), strict=True):
        assert isinstance(left, PackedCache)
        assert isinstance(right, PackedCache)
        assert (left.blocks == right.blocks).all()
    native.set_num_threads(1)


FAMILIES = (
    *("gemma2, other caps, biases", "gemma3", "glm4, turned otherwise, no biases", "ministral3", "olmo3"),
    *("phi3, partly turned, sliding", "smollm3"),
)
"""With all that their layers have beside the usual."""


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_family_are_recorded_and_give_the_same_bits_however_a_text_is_cut(
    tmp_path: Path, family: str, quantization: str
) -> None:
    name, changes = CASES[family]
    write_random(tmp_path, name, **(SHAPE | changes))
    options = {"dtype": "bfloat16", "quantization": quantization, "block_size": 16, "max_num_batched_tokens": 64}
    checkpoint, settings = settings_for(tmp_path, max_num_seqs=4, **options)
    assert LIBRARY is not None
    ops, text = native_ops(LIBRARY), [7 * place % 150 for place in range(50)]
    model = load_model(checkpoint, settings, ops)
    forwards = [
        RecordedForward(model, KVCache.of_model(model.spec, settings, ops), ops, LIBRARY, 64, 4) for _ in range(2)
    ]
    tables = [[array("i", range(4))]] * len(settings.memory.groups)
    logits = []
    for forward, cuts in zip(forwards, ((0, 49), (0, 17, 18, 40, 49)), strict=True):
        for first, last in itertools.pairwise(cuts):
            forward.run(plan_of([(first, text[first:last])], tables[0], [last - first - 1]).forward, tables)
        logits.append(forward.run(plan_of([(49, text[49:])], tables[0], [0]).forward, tables).numpy().copy())
    assert (logits[0] == logits[1]).all()
