"""Engines of small models in the test's own process, and what their requests answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.api.request import Request, TokenLogprob
from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.engine_config import EngineConfig, Role
from penstock.config.footprint import PoolLimits
from penstock.config.memory import layer_groups
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from penstock.models.registry import read_facts

BLOCK_SIZE, BUDGET, NUM_SEQS = 16, 48, 6

Answer = tuple[list[int], list[TokenLogprob]]


def engine(model: Path, role: Role = "any", **options: object) -> EngineCore:
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
    return build_engine(replace(EngineConfig.from_options(**(settings | options)), role=role))


def memory_for(model: Path, num_blocks: int) -> int:
    """`kv_cache_memory` with which the main group has so many blocks."""
    caches = read_facts(open_checkpoint(str(model))).caches
    groups = layer_groups(caches, PoolLimits(288, NUM_SEQS, BUDGET, BLOCK_SIZE), num_blocks)
    kept = ((group, caches[layer]) for group in groups for layer in group.layers)
    return sum(group.num_blocks * one.block_bytes(BLOCK_SIZE, "float32") for group, one in kept if one is not None)


def request_of(
    core: EngineCore, name: str, prompt: list[int], max_tokens: int = 40, n: int = 1, **options: Any
) -> Request:
    controls = {"temperature": 0.7, "seed": 5, "ignore_eos": True, "logprobs": 2}
    params = SamplingParams(max_tokens=max_tokens, n=n, **(controls | options))
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
            assert output.error is None, output.error
            tokens, logprobs = answers.setdefault((output.request_id, output.index), ([], []))
            tokens += output.token_ids
            logprobs += output.logprobs or []
        core.check_integrity()
        step += 1
    return answers


def hits_of(core: EngineCore, request: Request) -> int:
    """How many tokens of a request's prompt are found in the prefix cache."""
    core.add_request(request)
    cached = 0
    while core.has_work:
        cached += sum(output.num_cached_tokens or 0 for output in core.step())
        core.check_integrity()
    return cached
