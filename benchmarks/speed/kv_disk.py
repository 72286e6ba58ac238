"""Time to the first token of a prompt whose blocks are in a file, relative to computing it; and what writing costs.

    python -m benchmarks.speed.kv_disk [--model FOLDER] [--tokens 2000] [--runs 3] [--threads 2] [--out FILE]

Each run has a prompt of its own. `computed`: nothing is known of it. `evicted`: another prompt has taken its blocks,
and they come from the file. `restarted`: a new engine finds the file. `pulled`: another engine, of the role `decode`,
reads the file of the first one. `memory`: the blocks are in the pool. `writing` is the time of computing with a file
over that without one. All in one process, one after another, so that other load concerns the ratios little; the file is
read from the system's page cache, if that has it. Exits with 1 if a ratio is above the bar.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from penstock.api.request import BlockSource
from penstock.api.sampling_params import SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.frontend.input_processor import InputProcessor
from penstock.models.registry import read_facts

BAR = 0.08
BLOCK_SIZE = 32
ROOM = 1.25
"""Prompts that the pool holds: the next one takes most of its blocks."""


def pool_bytes(model: str | None, tokens: int) -> int:
    facts = read_facts(open_checkpoint(model))
    dtype = "bfloat16" if facts.halves_kv else facts.dtype
    block = sum(cache.block_bytes(BLOCK_SIZE, dtype) for cache in facts.caches if cache is not None)
    return int(ROOM * (tokens / BLOCK_SIZE + 2)) * block


def start(options: argparse.Namespace, role: Any = "any", file: str | None = None) -> EngineCore:
    """An engine with room for little more than a prompt, and memory that is in use already."""
    config = EngineConfig.from_options(
        model=options.model,
        threads=options.threads,
        block_size=BLOCK_SIZE,
        max_model_len=options.tokens + 8,
        kv_cache_memory=pool_bytes(options.model, options.tokens),
        kv_disk=file,
    )
    core = build_engine(replace(config, role=role))
    first_token(core, Random(0).choices(range(5, 200), k=options.tokens))
    return core


IDS = itertools.count()


def first_token(core: EngineCore, prompt: list[int], source: BlockSource | None = None) -> tuple[float, int, int]:
    """Seconds until the first token, the token, and how many of the prompt's were found."""
    params = SamplingParams(max_tokens=1, temperature=0)
    request = InputProcessor(None, core.info).make_request(prompt, params, request_id=str(next(IDS)), arrival=0.0)
    began = time.perf_counter()
    core.add_request(request, (), source)
    outputs = []
    while core.has_work:
        outputs += core.step()
    seconds = time.perf_counter() - began
    while core.is_writing:
        core.poll_transfers()
        time.sleep(0.001)
    return seconds, outputs[0].token_ids[0], outputs[0].num_cached_tokens


def source_of(core: EngineCore, prompt: list[int]) -> BlockSource:
    """Where the engine's file has a prompt's blocks."""
    params = SamplingParams(max_tokens=2, temperature=0)
    request = InputProcessor(None, core.info).make_request(prompt, params, request_id=str(next(IDS)), arrival=0.0)
    core.add_request(request)
    while not any(output.token_ids for output in core.step()):
        pass
    core.hand_over(request.request_id)
    while True:
        core.poll_transfers()
        for _, source in core.drain_handovers():
            assert source is not None
            return source
        time.sleep(0.001)


def measure(options: argparse.Namespace, folder: str) -> dict[str, list[float]]:
    rng = Random(options.seed)
    prompts = [rng.choices(range(5, 200), k=options.tokens) for _ in range(options.runs)]
    file = f"{folder}/kv:{options.size}"
    times: dict[str, list[float]] = {}
    answers: dict[int, int] = {}

    def note(kind: str, core: EngineCore, number: int, source: BlockSource | None = None) -> None:
        seconds, token, cached = first_token(core, prompts[number], source)
        least = 0 if kind in ("computed", "without") else (options.tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert cached == least, f"{kind}: {cached} tokens were found"
        assert answers.setdefault(number, token) == token, f"{kind}: another token"
        times.setdefault(kind, []).append(seconds)

    plain, core = start(options), start(options, file=file)
    for number in range(options.runs):
        for kind, engine in sorted({"without": plain, "computed": core}.items(), reverse=number % 2 == 1):
            note(kind, engine, number)
        note("memory", core, number)
    for number in range(options.runs):
        note("evicted", core, number)
    plain.close()
    core.close()
    core = start(options, file=file)
    for number in range(options.runs):
        note("restarted", core, number)
    peer = start(options, role="decode")
    for number in range(options.runs):
        note("pulled", peer, number, source_of(core, prompts[number]))
    peer.close()
    core.close()
    return times


def report(options: argparse.Namespace, times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    computed = medians["computed"]
    ratios = {kind: medians[kind] / computed for kind in ("evicted", "restarted", "pulled", "memory")}
    pairs = zip(times["computed"], times["without"], strict=True)
    ratios["writing"] = statistics.median(writing / other for writing, other in pairs)
    return {
        "model": Path(options.model).name if options.model else "demo",
        "tokens": options.tokens,
        "threads": options.threads,
        "runs": options.runs,
        "seconds": {kind: round(value, 4) for kind, value in medians.items()},
        "ratios": {kind: round(value, 4) for kind, value in ratios.items()},
    }


def main() -> int:
    """Measure and tell; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder; default: the demo model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", default="4GiB", help="of the file")
    parser.add_argument("--folder", help="where the file is; default: that of temporary files")
    parser.add_argument("--out", help="add the result to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = report(options, measure(options, folder))
    for kind, ratio in found["ratios"].items():
        seconds = found["seconds"].get(kind)
        print(f"{kind:10} {ratio:7.2%}" + (f" {seconds * 1e3:9.1f} ms" if seconds is not None else ""))
    if options.out:
        path = Path(options.out)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {found["model"]: found}, indent=1) + "\n")
    return int(max(found["ratios"][kind] for kind in ("evicted", "restarted", "pulled")) > BAR)


if __name__ == "__main__":
    sys.exit(main())
