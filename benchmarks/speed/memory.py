"""What an engine takes of memory beside its weights and its KV cache: Python, torch, loading, a step's workspace.

    python -m benchmarks.speed.memory MODEL        (bar: 450 MiB; writes results/<machine>/memory.json)

MODEL is of qwen3-0.6b's shape (`/work/shared/peers/make_model.py` writes one). For each width of weights a fresh
process loads it with the options' defaults but for a KV cache of 1 GiB, and fills that with prompts, so that every page
of it is touched. The figure is the process's peak (VmHWM) less weights and KV cache, which the memory plan tells.
"""

import argparse
import random
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.report import report
from penstock.api.sampling_params import SamplingParams
from penstock.config.byte_counts import MIB
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import build_engine
from penstock.frontend.input_processor import InputProcessor

BAR = 450.0
KINDS = {"bf16": None, "int8": "int8", "int4": "int4"}
PROMPT = 448


def excess(model: str, kind: str) -> float:
    """MiB of this process's peak that neither weights nor KV cache account for, after a full load of work."""
    core = build_engine(EngineConfig.from_options(model=model, quantization=KINDS[kind], kv_cache_memory="1GiB"))
    memory, input_processor, rng = core.settings.memory, InputProcessor(None, core.info), random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for index in range(memory.num_tokens // PROMPT + 2):
        prompt = [rng.randrange(3, core.info.vocab_size) for _ in range(PROMPT)]
        core.add_request(input_processor.make_request(prompt, params, request_id=str(index), arrival=0.0))
    fewest = memory.num_blocks
    while core.has_work:
        core.step()
        fewest = min(fewest, core.stats().blocks_free)
    assert fewest < 0.05 * memory.num_blocks, "part of the KV cache was never touched"
    return (_peak() - memory.weights - memory.kv_cache) / MIB


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _measure(model: str, kind: str) -> float:
    command = [sys.executable, "-m", "benchmarks.speed.memory", model, "--kind", kind]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kind", choices=KINDS, help="measure this one, in this process")
    args = parser.parse_args()
    if args.kind is not None:
        print(excess(args.model, args.kind))
        return 0
    names = {f"peak beside weights and KV cache, {kind}, MiB": kind for kind in KINDS}
    return report("memory", {name: (_measure(args.model, kind), BAR) for name, kind in names.items()})


if __name__ == "__main__":
    sys.exit(main())
