"""Whether a model decodes as fast in one start as in the next: its first, which packs the weights, and later ones.

    python -m benchmarks.speed.starts MODEL [--options quantization=int8] [--starts 8]

Each start is a fresh process, all with one folder of packed weights, which is empty at first; its rate is the median of
five answers of 64 tokens, one after another, after one that is not counted. Rows go to results/<machine>/starts.json
beside those of other models. Exits with 1 if the bar is missed.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import report

START = """
import statistics, sys, time
from penstock import LLM, SamplingParams
options = dict(pair.split("=", 1) for pair in sys.argv[3:])
params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)

def rate(llm):
    began = time.perf_counter()
    llm.generate([[5, 6, 7, 8]], params)
    return params.max_tokens / (time.perf_counter() - began)

with LLM(sys.argv[1], packed_cache=sys.argv[2], kv_cache_memory="256MiB", max_model_len=512, **options) as llm:
    print(statistics.median([rate(llm) for _ in range(6)][1:]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--options", nargs="*", default=[])
    parser.add_argument("--starts", type=int, default=8)
    args = parser.parse_args()
    rates = []
    with tempfile.TemporaryDirectory() as packed:
        command = [sys.executable, "-c", START, args.model, packed, *args.options]
        for number in range(args.starts):
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            rates.append(float(printed.stdout))
            print(f"start {number}: {rates[-1]:.1f} tokens/s", flush=True)
    name = " ".join([Path(args.model).stem, *args.options])
    rows: dict[str, tuple[float, float | None]] = {
        f"{name}: first start, tokens/s": (rates[0], None),
        f"{name}: fastest start, tokens/s": (max(rates), None),
        f"{name}: slowest start, tokens/s": (min(rates), None),
        f"{name}: the fastest divided by the slowest": (max(rates) / min(rates), 1.15),
    }
    return report("starts", rows, beside=True)


if __name__ == "__main__":
    sys.exit(main())
