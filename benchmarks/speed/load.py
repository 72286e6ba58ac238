"""Seconds until a model is ready: at its first start, which packs the weights, and at later ones, which map them.

    python -m benchmarks.speed.load MODEL [--options quantization=int4] [--first 10] [--later 2.5]

MODEL is a folder or GGUF file. Each start is a fresh process, its imports included; a first start has an empty folder
of packed weights. Medians of three, after one start that brings the model's files into the page cache. --first and
--later are bars; rows go to results/<machine>/load.json beside those of other models.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import report

RUNS = 3
START = """
import sys
from penstock import LLM
options = dict(pair.split("=", 1) for pair in sys.argv[3:])
llm = LLM(sys.argv[1], packed_cache=sys.argv[2], kv_cache_memory="256MiB", max_model_len=512, **options)
print("ready", flush=True)
llm.close()
"""


def seconds(model: str, packed: str, options: list[str]) -> float:
    """From the start of a process until its model is ready."""
    began = time.perf_counter()
    command = [sys.executable, "-c", START, model, packed, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        ready = time.perf_counter()
    if said != "ready\n" or process.returncode:
        raise SystemExit(f"{model} does not load")
    return ready - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--options", nargs="*", default=[])
    parser.add_argument("--first", type=float)
    parser.add_argument("--later", type=float)
    args = parser.parse_args()
    first, later = [], []
    for _ in range(RUNS + 1):
        with tempfile.TemporaryDirectory() as packed:
            first.append(seconds(args.model, packed, args.options))
            later.append(seconds(args.model, packed, args.options))
    model = Path(args.model)
    name = " ".join([model.name if model.is_dir() else f"{model.parent.name} {model.stem}", *args.options])
    rows = {
        f"{name}: first start, s": (statistics.median(first[1:]), args.first),
        f"{name}: later starts, s": (statistics.median(later[1:]), args.later),
    }
    return report("load", rows, beside=True)


if __name__ == "__main__":
    sys.exit(main())
