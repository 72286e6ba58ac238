"""A hybrid with drafts, a window and a mixture model behind a real server whose engine is killed, over a pool that is
too small: each stream tells, bit for bit, what its request is answered alone, without drafts.
"""

import asyncio
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock import native
from tests.e2e.engines import answers_of, engine, memory_for, request_of
from tests.e2e.test_killed_engine import Told, read_tokens, tell_all
from tests.server.running import RunningServer, running_server
from tests.support.checkpoints import write_random, write_tokenizer
from tests.support.mtp import write_with_head

SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "num_hidden_layers": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3Moe": {"num_hidden_layers": 2, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
NUM_TOKENS, NUM_BLOCKS = 110, 18


def prompts() -> list[list[int]]:
    """Some begin alike."""
    rng = Random(3)
    shared = [rng.randrange(384) for _ in range(100)]
    return [shared[: 33 * (i % 4)] + [rng.randrange(384) for _ in range(5 + 9 * i)] for i in range(10)]


def alone(model: Path) -> list[list[float]]:
    """The log-probabilities of each answer, by an engine that has nothing else to do and caches no prefix."""
    core = engine(model, enable_prefix_caching=False, kv_cache_memory="8MiB")
    found = []
    for index, prompt in enumerate(prompts()):
        (answer,) = answers_of(core, [request_of(core, str(index), prompt, NUM_TOKENS, seed=index)]).values()
        found.append([entry.logprob for entry in answer[1]])
    core.close()
    return found


async def told_though_killed(server: RunningServer) -> list[Told]:
    """Of all streams at once but the last; the engine dies when a third of the tokens is there. The last stream comes
    then, so that the engine's successor has something to do however far the others are.
    """
    engine_pid = server.engine_pid
    bodies = [
        {
            "prompt": prompt,
            "temperature": 0.7,
            "seed": index,
            "logprobs": 2,
            "max_tokens": NUM_TOKENS,
            "extra_body": {"ignore_eos": True},
        }
        for index, prompt in enumerate(prompts())
    ]
    telling = asyncio.ensure_future(tell_all(server, bodies[:-1]))
    while not telling.done() and await read_tokens(server) < len(bodies) * NUM_TOKENS / 3:
        await asyncio.sleep(0.01)
    os.kill(engine_pid, signal.SIGKILL)
    last = await tell_all(server, bodies[-1:])
    return [*await telling, *last]


@pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact across batches")
@pytest.mark.parametrize("family", MODELS)
def test_streams_of_each_kind_of_model_tell_what_they_tell_alone(tmp_path: Path, family: str) -> None:
    write_random(tmp_path, family, **SHAPE, **MODELS[family])
    write_tokenizer(tmp_path, 384)
    seen = check_streams(tmp_path, memory_for(tmp_path, NUM_BLOCKS))
    assert seen["penstock_num_preemptions_total"] > 0, "the pool is too large to prove anything"


@pytest.mark.skipif(native.library() is None, reason="the reference kernels are not exact across batches")
def test_streams_of_a_hybrid_whose_own_head_guesses_tell_what_they_tell_alone(tmp_path: Path) -> None:
    write_with_head(tmp_path, "Qwen3_5")
    seen = check_streams(tmp_path, "300KiB", speculation="mtp")
    assert seen["penstock_num_preemptions_total"] > 0, "the pool is too large to prove anything"
    assert seen["penstock_spec_decode_num_draft_tokens_total"] > 0


def check_streams(model: Path, kv_cache_memory: int | str, **more: str) -> dict[str, float]:
    """Compare answers through a kill of the engine with those of each request alone; returns the server's metrics."""
    options = {
        "dtype": "float32",
        "threads": 1,
        "block-size": 16,
        "max-model-len": 288,
        "max-num-seqs": 6,
        "max-num-batched-tokens": 48,
        "kv-cache-memory": kv_cache_memory,
        "packed-cache": "off",
        **more,
    }
    flags = [f"--{key}={value}" for key, value in options.items()]
    with running_server("--model", str(model), *flags) as server:
        told = asyncio.run(told_though_killed(server))
        seen = server.metrics()
    assert [each[0][2] for each in told] == alone(model)
    assert seen["penstock_engine_restarts_total"] == 1
    assert seen["penstock_prefix_cache_hits_total"] > 0
    return seen
