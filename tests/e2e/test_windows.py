"""Models with sliding windows: what lies behind a window is given back, and no answer changes by it."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.engine.core import EngineCore
from penstock.models.registry import read_facts
from tests.e2e.engines import BLOCK_SIZE, BUDGET, Answer, answers_of, engine, hits_of, memory_for, request_of
from tests.support.checkpoints import write_random

WINDOW = 24
SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
MODELS = {
    "every layer": ("Mistral", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "some layers": (
        "Qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "_"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("windows")
    write_random(folder, family, max_position_embeddings=512, num_key_value_heads=1, **SHAPE, **changes)
    return folder


@pytest.fixture
def core(model: Path) -> Iterator[EngineCore]:
    core = engine(model)
    yield core
    core.close()


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
    windows = [kept.window for kept in read_facts(open_checkpoint(str(model))).caches if kept is not None]
    crowd = engine(model, kv_cache_memory=memory_for(model, 18))
    assert crowd.settings.memory.num_blocks == 18
    assert answers_of(crowd, requests, gap=2) == alone
    stats = crowd.stats()
    assert stats.preemptions > 0 or None not in windows, "the pool is too large to prove anything"
    assert stats.prefix_hit_tokens > 0
    assert answers_of(crowd, requests) == alone, "the second time, from what is cached"
    crowd.close()


def test_a_sequence_holds_no_more_of_a_window_than_it_sees(core: EngineCore) -> None:
    rng = Random(1)
    core.add_request(request_of(core, "long", [rng.randrange(96) for _ in range(220)], 60))
    windows = [group.window for group in core.settings.memory.groups]
    most = (WINDOW + BUDGET) // BLOCK_SIZE + 3
    has_answered = False
    while core.has_work:
        has_answered |= any(output.token_ids for output in core.step())
        for group, pool in enumerate(core._scheduler.kv.pools):
            if windows[group] is not None and (group or has_answered):  # the main group's come with the admission
                assert pool.num_held <= most
    assert WINDOW in windows


def test_the_next_turn_of_a_chat_is_found_in_the_cache(core: EngineCore) -> None:
    rng = Random(2)
    prompt = [rng.randrange(96) for _ in range(200)]
    answer, _ = answers_of(core, [request_of(core, "first", prompt)])[("first", 0)]
    known = (len(prompt) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert hits_of(core, request_of(core, "second", [*prompt, *answer, 5, 6, 7], 2)) == known
