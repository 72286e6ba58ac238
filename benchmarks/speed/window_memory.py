"""Memory per token of context that a model with sliding windows takes, beside what its windows need.

    python -m benchmarks.speed.window_memory MODEL [--short 14336] [--long 28672]

For each length a fresh process computes one prompt of it, in steps of 512 tokens, and reads its anonymous memory. From
one length to the other only the layers without a window need more: the keys and values of the tokens between. Both
lengths are above the 12,288 tokens whose memory is backed at start. The prefix cache is off: blocks that a window has
passed would stay in it, idle, until the pool needs them. Writes results/<machine>/window_memory.json; the bar is that
need and 5 %.
"""

import argparse
import random
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.report import report
from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.config.model_facts import KVSpec
from penstock.engine.build import build_engine
from penstock.frontend.input_processor import InputProcessor
from penstock.models.registry import read_facts


def measure(model: str, tokens: int) -> tuple[int, int]:
    """Bytes of anonymous memory after a prompt of `tokens`, and those that its keys and values need."""
    core = build_engine(
        EngineConfig.from_options(
            model=model, kv_cache_memory="4GiB", max_num_batched_tokens=512, enable_prefix_caching=False
        )
    )
    rng = random.Random(0)
    prompt = [rng.randrange(3, core.info.vocab_size) for _ in range(tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    core.add_request(InputProcessor(None, core.info).make_request(prompt, params, request_id="0", arrival=0.0))
    while core.has_work:
        core.step()
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    facts, dtype = read_facts(open_checkpoint(model)), core.settings.kv_cache_dtype
    needed = sum(
        cache.block_bytes(1, dtype) * (tokens if cache.window is None else min(tokens, cache.window))
        for cache in facts.caches
        if isinstance(cache, KVSpec)
    )
    return int(found[1]) * 1024, needed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--short", type=int, default=14336)
    parser.add_argument("--long", type=int, default=28672)
    parser.add_argument("--tokens", type=int, help="measure this length, in this process")
    args = parser.parse_args()
    if args.tokens is not None:
        print(*measure(args.model, args.tokens))
        return 0
    lengths = (args.short, args.long)
    short, long = (
        [
            int(word)
            for word in subprocess.run(
                [sys.executable, "-m", "benchmarks.speed.window_memory", args.model, "--tokens", str(tokens)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()[-2:]
        ]
        for tokens in lengths
    )
    more = args.long - args.short
    taken, needed = ((end - begin) / more for begin, end in zip(short, long, strict=True))
    name = Path(args.model).name
    return report(
        "window_memory",
        {
            f"{name}: bytes per token of context needed, from {args.short} to {args.long} tokens": (needed, None),
            f"{name}: bytes per token of context taken": (taken, 1.05 * needed),
        },
        beside=True,
    )


if __name__ == "__main__":
    sys.exit(main())
