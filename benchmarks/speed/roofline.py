"""Penstock and its peers beside what the machine allows at all.

    python -m benchmarks.speed.roofline [--machine zen5]

Reads the machine's results of `peers.py` and the ceilings in those of `linear.py`. The bound of a scenario is a perfect
engine's: prompts at the peak rate of the arithmetic, decodes at that or at the rate of reading all weights and all keys
and values once a step, whichever is slower. `page.py` puts the shares into docs/performance.md.
"""

import argparse
import json
from dataclasses import dataclass

from benchmarks.report import RESULTS, machine_name
from benchmarks.speed.scenarios import Scenario

# qwen3-0.6b: 28 layers of 1,024 with 16 heads and 8 key-value heads of 128, MLP 3,072, vocabulary 151,936
LAYER_WEIGHTS = 28 * (1024 * 128 * (16 + 8 + 8) + 128 * 16 * 1024 + 3 * 1024 * 3072)
HEAD_WEIGHTS = 151_936 * 1024
KV_ELEMENTS = 28 * 2 * 8 * 128  # a token's keys and values
PAIR_OPERATIONS = 28 * 16 * 128 * 4  # of attention, for each query and key


@dataclass(frozen=True, slots=True)
class Width:
    """A kind of weights: the bytes of a weight, of one of the head and of an element of the cache, and the ceiling of
    its arithmetic.
    """

    name: str
    bytes_a_weight: float
    head_bytes: float
    kv_bytes: float
    rate: str


def widths(ceilings: dict[str, float]) -> tuple[Width, ...]:
    """Where the processor multiplies bfloat16, 12 bits hold a weight of it (`docs/native-kernels.md`)."""
    bf16 = (1.5, 1.5, 2, "bfloat16") if "bfloat16" in ceilings else (2, 2, 2, "int16")
    return (
        Width("bf16", *bf16),
        Width("int8", 1, 1, 1, "int8"),
        Width("int4", 0.5, 0.75, 1, "int8"),
    )


def bound(scenario: str, width: Width, ceilings: dict[str, float]) -> tuple[float, float]:
    """The most that the machine allows in a scenario "NxIN:OUT[:shared=S]": (output, all) tokens a second."""
    parsed = Scenario.parse(scenario)
    count, longest, steps, shared = parsed.streams, parsed.prompt, parsed.output, parsed.shared
    prompt = longest if count == 1 else max(0.75 * longest, shared + 1)  # lengths are drawn from the upper half
    attention = "bfloat16" if "bfloat16" in ceilings else "float32"
    rate, pair_rate, read = (ceilings[name] * 1e9 for name in (width.rate, attention, "read"))
    computed = count * (prompt - shared) + shared
    pairs = count * (prompt**2 - shared**2) / 2 + shared**2 / 2
    seconds = 2 * (computed * LAYER_WEIGHTS + count * HEAD_WEIGHTS) / rate + pairs * PAIR_OPERATIONS / pair_rate
    weights = LAYER_WEIGHTS * width.bytes_a_weight + HEAD_WEIGHTS * width.head_bytes
    for step in range(1, steps):
        keys = count * (prompt + step)
        operations = 2 * count * (LAYER_WEIGHTS + HEAD_WEIGHTS) / rate + keys * PAIR_OPERATIONS / pair_rate
        seconds += max((weights + keys * KV_ELEMENTS * width.kv_bytes) / read, operations)
    return count * steps / seconds, count * (prompt + steps) / seconds


Row = tuple[str, dict[str, float], float]
"""A scenario, tokens a second by engine, and the bound."""


def rows_of(measured: dict[str, dict[str, float]], width: Width, ceilings: dict[str, float]) -> list[Row]:
    rows = []
    for name, engines in measured.items():
        scenario, _, unit = name.partition("  ")
        if unit:
            rows.append((scenario, engines, bound(scenario, width, ceilings)[unit == "total tok/s"]))
    return rows


def tables(machine: str) -> dict[str, list[Row]]:
    """The rows of qwen3-0.6b by kind of weights, beside OpenVINO."""
    folder = RESULTS / machine
    ceilings = json.loads((folder / "linear.json").read_text())["ceilings, GB/s or G operations/s"]
    peers = json.loads((folder / "peers.json").read_text())
    return {w.name: rows_of(peers[f"qwen3-0.6b {w.name} openvino"], w, ceilings) for w in widths(ceilings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=machine_name(), help="a folder of results")
    arguments = parser.parse_args()
    for name, rows in tables(arguments.machine).items():
        for scenario, engines, most in rows:
            shares = ", ".join(f"{engine} {rate:.1f} ({rate / most:.2f})" for engine, rate in engines.items())
            print(f"{name} {scenario:<24} bound {most:7.1f} tok/s: {shares}")


if __name__ == "__main__":
    main()
