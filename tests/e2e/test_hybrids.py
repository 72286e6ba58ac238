"""Models with recurrent layers, and over latents: whatever the chunks, the company and the cache, an answer stays."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.models import registry
from tests.e2e.engines import BLOCK_SIZE, Answer, answers_of, engine, hits_of, memory_for, request_of
from tests.support.checkpoints import write_random
from tests.support.hybrid import SHAPE, toy_hybrid_spec, write_toy_hybrid

WRITTEN: dict[str, dict[str, Any]] = {
    "Lfm2": {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "DeepseekV3": {
        "num_key_value_heads": 2,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


@pytest.fixture(scope="module", params=["toy", *WRITTEN])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    if request.param != "toy":
        write_random(folder, request.param, **SHAPE, **WRITTEN[request.param])
        yield folder
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ARCHITECTURES, "ToyHybridForCausalLM", toy_hybrid_spec)
        yield write_toy_hybrid(folder)


def prompts() -> list[list[int]]:
    rng = Random(3)
    shared = [rng.randrange(96) for _ in range(130)]
    return [
        shared[: rng.choice((0, 17, 64, 130))] + [rng.randrange(96) for _ in range(length)]
        for length in range(3, 99, 6)
    ]


def test_answers_in_a_crowd_over_a_small_pool_are_those_alone(model: Path) -> None:
    core = engine(model, enable_prefix_caching=False)
    requests = [request_of(core, str(i), prompt, n=1 + i % 2) for i, prompt in enumerate(prompts())]
    alone: dict[tuple[str, int], Answer] = {}
    for request in requests:
        alone |= answers_of(core, [request])
    core.close()
    crowd = engine(model, kv_cache_memory=memory_for(model, 18))
    assert crowd.settings.memory.num_blocks == 18
    assert answers_of(crowd, requests, gap=2) == alone
    stats = crowd.stats()
    assert stats.preemptions > 0, "the pool is too large to prove anything"
    assert stats.prefix_hit_tokens > 0
    assert answers_of(crowd, requests) == alone, "the second time, from what is cached"
    crowd.close()


@pytest.mark.parametrize("budget", [6, 7, 15, 16, 17, 33, 100])
def test_chunks_of_any_size_make_the_same_answers(model: Path, budget: int) -> None:
    rng = Random(4)
    texts = [[rng.randrange(96) for _ in range(length)] for length in (90, 31, 16)]
    answers = []
    for most in (512, budget):
        core = engine(model, max_num_batched_tokens=most)
        answers.append(answers_of(core, [request_of(core, str(i), text, 12) for i, text in enumerate(texts)]))
        core.close()
    assert answers[0] == answers[1]


def test_the_next_turn_of_a_chat_is_found_in_the_cache(model: Path) -> None:
    core = engine(model)
    rng = Random(2)
    prompt = [rng.randrange(96) for _ in range(200)]
    answer, _ = answers_of(core, [request_of(core, "first", prompt)])["first", 0]
    known = (len(prompt) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    second = [*prompt, *answer, 5, 6, 7]
    assert hits_of(core, request_of(core, "second", second, 2)) == known
    whole = (len(prompt) + len(answer)) // BLOCK_SIZE * BLOCK_SIZE
    assert hits_of(core, request_of(core, "another second", [*prompt, *answer, 9], 2)) == whole
    assert hits_of(core, request_of(core, "the first again", prompt, 2)) == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    from_cache = answers_of(core, [request_of(core, "once more", second)])["once more", 0]
    core.close()
    core = engine(model, enable_prefix_caching=False)
    assert answers_of(core, [request_of(core, "once more", second)])["once more", 0] == from_cache
    core.close()


def test_beams_are_those_without_a_cache(model: Path) -> None:
    found = []
    for caching in (True, False):
        core = engine(model, enable_prefix_caching=caching)
        core.add_request(request_of(core, "r", list(range(40)), 20, num_beams=3, temperature=0.0))
        outputs = []
        while core.has_work:
            outputs += [(output.token_ids, output.score) for output in core.step() if output.score is not None]
            core.check_integrity()
        found.append(outputs)
        core.close()
    assert len(found[0]) == 1
    assert found[0] == found[1]
