"""Models with sliding windows: what lies behind a window is given back, and no answer changes by it."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from penstock.checkpoint import open_checkpoint
from penstock.config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from penstock.models.registry import read_facts
from penstock.request import Request, TokenLogprob
from penstock.sampling_params import SamplingParams
from tests.checkpoints import write_random

WINDOW, BLOCK_SIZE, BUDGET, NUM_SEQS = 24, 16, 48, 6
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

Answer = tuple[list[int], list[TokenLogprob]]


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "_"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("windows")
    write_random(folder, family, max_position_embeddings=512, num_key_value_heads=1, **SHAPE, **changes)
    return folder


def engine(model: Path, **options: object) -> EngineCore:
    settings = {
        "model": str(model),
        "dtype": "float32",
        "threads": 1,
        "block_size": BLOCK_SIZE,
        "max_model_len": 288,
        "max_num_seqs": NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
        "kv_cache_memory": "2MiB",
    }
    return build_engine(EngineConfig.from_options(**(settings | options)))


@pytest.fixture
def core(model: Path) -> Iterator[EngineCore]:
    core = engine(model)
    yield core
    core.close()


def request_of(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 40, n: int = 1) -> Request:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=max_tokens, n=n, ignore_eos=True, logprobs=2)
    return InputProcessor(None, core.info).make_request(prompt, params, request_id=name, arrival=0.0)


def answers_of(core: EngineCore, requests: list[Request], gap: int = 0) -> dict[tuple[str, int], Answer]:
    """All answers, with a new request every `gap` steps."""
    answers: dict[tuple[str, int], Answer] = {}
    waiting, step = list(requests), 0
    while core.has_work or waiting:
        while waiting and (not gap or step % gap == 0):
            core.add_request(waiting.pop(0))
            if gap:
                break
        for output in core.step():
            assert output.error is None
            tokens, logprobs = answers.setdefault((output.request_id, output.index), ([], []))
            tokens += output.token_ids
            logprobs += output.logprobs or []
        core.check_integrity()
        step += 1
    return answers


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
    crowd = engine(model, kv_cache_memory=18 * 2 * len(windows) * 16 * 4 * BLOCK_SIZE)
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
    core.add_request(request_of(core, "second", [*prompt, *answer, 5, 6, 7], 2))
    cached = [output.num_cached_tokens for output in core.step() if output.num_cached_tokens]
    while core.has_work:
        cached += [output.num_cached_tokens for output in core.step() if output.num_cached_tokens]
    known = (len(prompt) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached == [known]
