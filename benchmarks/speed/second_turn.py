"""Time to the first token of a chat's second turn, relative to the first turn's, on models of several kinds of memory.

    python -m benchmarks.speed.second_turn [--tokens 4000] [--runs 3] [--models latents]
                                     (bar: 0.10; of all models, writes results/<machine>/second_turn.json)

Models are random, in the layers' real shapes and with fewer of them: recurrent layers beside attention (LFM2 350M),
windows (Gemma 3 1B), latents (DeepSeek V2 Lite, without experts), and attention alone to compare with. A first turn has
a prompt of so many tokens and an answer of 32; the second is all of that and 60 tokens more. Each run has tokens of its
own. Both times are taken in one process, one after the other, so that other load on the machine concerns their ratio
little. Medians of the runs. Exits with 1 if one is above the bar.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.report import report
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from tests.support.checkpoints import write_random

BAR = 0.10
ANSWER, QUESTION, VOCAB = 32, 60, 8192
HIDDEN: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 8192, "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": (
        "Qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "hybrid": (
        "Lfm2",
        {
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
        },
    ),
    "windows": (
        "Gemma3",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    "latents": (
        "DeepseekV2",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
}


def answer(core: EngineCore, name: str, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Seconds to the first token, tokens of the prompt that were in the cache, and the answer."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    core.add_request(InputProcessor(None, core.info).make_request(prompt, params, request_id=name, arrival=0.0))
    began, seconds, cached, tokens = time.perf_counter(), 0.0, 0, list[int]()
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            cached += output.num_cached_tokens or 0
            tokens += output.token_ids
            if tokens and not seconds:
                seconds = time.perf_counter() - began
    return seconds, cached, tokens


def measure(folder: Path, num_tokens: int, runs: int) -> dict[str, Any]:
    options = {"model": str(folder), "max_model_len": 8192, "max_num_seqs": 4, "kv_cache_memory": "1GiB"}
    core = build_engine(EngineConfig.from_options(**options))
    turns: list[tuple[float, float, int]] = []
    for run in range(runs + 1):
        rng = Random(run)
        prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
        first, _, told = answer(core, f"first {run}", prompt)
        second, cached, _ = answer(
            core, f"second {run}", [*prompt, *told, *(rng.randrange(VOCAB) for _ in range(QUESTION))]
        )
        turns.append((first, second, cached))
    core.close()
    firsts, seconds, cached_tokens = zip(*turns[1:], strict=True)  # the first pair warms up
    return {
        "first_seconds": round(statistics.median(firsts), 3),
        "second_seconds": round(statistics.median(seconds), 3),
        "ratio": round(statistics.median(second / first for first, second, _ in turns[1:]), 4),
        "second_prompt": num_tokens + ANSWER + QUESTION,
        "cached": min(cached_tokens),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    rows: dict[str, tuple[float, float | None]] = {}
    for name in arguments.models:
        family, shape = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            write_random(Path(folder), family, dtype="bfloat16", **HIDDEN, **shape)
            found = measure(Path(folder), arguments.tokens, arguments.runs)
        print(name, json.dumps(found), flush=True)
        rows[f"{name}: second turn over first, {arguments.tokens:,} tokens"] = found["ratio"], BAR
        rows[f"{name}: first turn, s"] = found["first_seconds"], None
    return report("second_turn", rows, keep=set(arguments.models) == set(MODELS))


if __name__ == "__main__":
    sys.exit(main())
