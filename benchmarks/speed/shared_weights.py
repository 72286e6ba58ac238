"""Resident memory of several engines of one model on one machine, which share the packed weights.

    python -m benchmarks.speed.shared_weights MODEL [--engines 4] [--options quantization=int4]

Each engine is a process of its own with its share of the cores, as those of a server are, and has a small KV pool. Its
proportional memory (Pss of /proc/PID/smaps: of pages that n processes map, each has an n-th) is added up. Bar: without
the pools, four take at most 1.3 times what one takes.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.report import report
from penstock.system.host import physical_cores

MIB = 2**20
POOL = 16
"""MiB of each engine's KV pool."""
ENGINE = """
import importlib, sys
from penstock.engine import startup
from penstock.config.engine_config import EngineConfig
options = dict(pair.split("=", 1) for pair in sys.argv[2:])
config = EngineConfig.from_options(model=sys.argv[1], max_model_len=512, kv_cache_memory="{pool}MiB", **options)
with startup.starting(config) as start:
    build = importlib.import_module("penstock.engine.build")
    start.imported()
    engine = build.build_engine(config, start=start)
print("ready", flush=True)
sys.stdin.read()
""".replace("{pool}", str(POOL))


def start(model: str, options: list[str], engines: int = 1) -> "subprocess.Popen[str]":
    """Start one of several engines, and wait until it is ready."""
    threads = max(1, physical_cores() // engines)
    command = [sys.executable, "-c", ENGINE, model, f"threads={threads}", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(engines: "list[subprocess.Popen[str]]") -> None:
    """End the engines, and empty the list."""
    for engine in engines:
        engine.kill()
        engine.wait()
    engines.clear()


def proportional(process: "subprocess.Popen[str]") -> tuple[float, float]:
    """MiB of a process, and of the packed weights in it."""
    total = weights = 0
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{process.pid}/smaps").read_text()):
        found = re.search(r"^Pss:\s+(\d+)", part, re.M)
        size = int(found[1]) * 1024 if found else 0
        total += size
        weights += size if ".packed" in part.partition("\n")[0] else 0
    return total / MIB, weights / MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--options", nargs="*", default=[])
    args = parser.parse_args()
    engines = [start(args.model, args.options)]  # packs the weights, unless they are in the cache; the others map them
    end(engines)
    try:
        engines.append(start(args.model, args.options))
        one, _ = proportional(engines[0])
        end(engines)
        engines += [start(args.model, args.options, args.engines) for _ in range(args.engines)]
        parts = [proportional(engine) for engine in engines]
    finally:
        end(engines)
    total, weights = (sum(values) for values in zip(*parts, strict=True))
    rows = {
        "MiB of one engine": (one, None),
        f"MiB of {args.engines} engines": (total, None),
        "of that packed weights, MiB": (weights, None),
        "MiB of each beside weights and pool": ((total - weights) / args.engines - POOL, None),
        f"{args.engines} engines to one, without the pools": ((total - POOL * args.engines) / (one - POOL), 1.3),
    }
    return report("shared-weights", rows)


if __name__ == "__main__":
    sys.exit(main())
