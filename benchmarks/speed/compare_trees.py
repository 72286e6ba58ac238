"""Two versions of Penstock on the same work, in turn: does a change cost speed?

    python -m benchmarks.speed.compare_trees MODEL BEFORE_PYTHON AFTER_PYTHON [--options quantization=int4] [--rounds 5]
                                       [--scenarios "1x32:64 8x64:64"] [--keep NAME]

Each Python has its version of Penstock installed; the workloads are those of `../shared/peers`. Rounds alternate which
version goes first. A ratio is the median of after over that of before: below 1 the change costs speed. Exits with 1 if
one is below 0.98. With --keep the ratios go to results/<machine>/compare_trees.json under NAME: only those within a run
count.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.report import results_file, save

KIT = Path(__file__).parents[3] / "shared" / "peers"
SCENARIOS = "1x32:64 1x1024:1 8x64:64 32x256:64 64x512:64 32x512:32:shared=384"
LEAST_RATIO = 0.98


def rates(python: str, target: str, scenarios: str) -> dict[str, float]:
    """All tokens a second, by scenario."""
    command = [python, str(KIT / "run_penstock.py"), target, scenarios, "0", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["scenario"]: row["total_tok_s"] for row in rows if "scenario" in row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--options", default="", help="keywords of LLM, as quantization=int4,kv_cache_dtype=int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scenarios", default=SCENARIOS)
    parser.add_argument("--keep", metavar="NAME", help='which versions and model, as "0.1 to 0.2, qwen3-0.6b q4_k_m"')
    args = parser.parse_args()
    target = args.model + (f"@{args.options}" if args.options else "")
    sides = {"before": args.before, "after": args.after}
    measured: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in sides}
    for number in range(args.rounds):
        for side in sorted(sides, reverse=number % 2 == 0):
            for scenario, rate in rates(sides[side], target, args.scenarios).items():
                measured[side][scenario].append(rate)
    medians = {side: {name: statistics.median(all_) for name, all_ in rows.items()} for side, rows in measured.items()}
    ratios = {name: medians["after"][name] / before for name, before in medians["before"].items()}
    for name, ratio in ratios.items():
        print(f"{name:<24} {medians['before'][name]:9.1f} -> {medians['after'][name]:9.1f} tok/s   {ratio:.3f}")
    if args.keep:
        file = results_file("compare_trees")
        kept = json.loads(file.read_text()) if file.exists() else {}
        save("compare_trees", kept | {args.keep: {name: round(ratio, 3) for name, ratio in ratios.items()}})
    return int(min(ratios.values()) < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
