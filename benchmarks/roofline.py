"""Penstock and its peers beside what the machine allows at all: a table, and the plot in docs.

    python benchmarks/roofline.py [--machine zen5] [--plot docs/performance.svg]

Reads the machine's results of `peers.py` and the ceilings in those of `linear.py`. The bound of a scenario is a perfect
engine's: prompts at the peak rate of the arithmetic, decodes at that or at the rate of reading all weights and all keys
and values once a step, whichever is slower. The plot needs matplotlib.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from report import RESULTS, machine_name

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
    head, out, *options = scenario.split(":")
    count, longest = map(int, head.split("x"))
    steps, shared = int(out), int(options[0].removeprefix("shared=")) if options else 0
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


def plot(tables: dict[str, list[Row]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(14, 4.2), sharey=True)
    for axis, (name, rows) in zip(axes, tables.items(), strict=True):
        engines = list(dict.fromkeys(engine for _, row, _ in rows for engine in row))
        for place, engine in enumerate(engines):
            shares = [row.get(engine, 0.0) / most for _, row, most in rows]
            offsets = [index + (place - (len(engines) - 1) / 2) * 0.8 / len(engines) for index in range(len(rows))]
            axis.bar(offsets, shares, 0.8 / len(engines), label=engine)
        axis.set_xticks(range(len(rows)), [scenario.replace(":shared", "\nshared") for scenario, _, _ in rows])
        axis.tick_params(axis="x", labelrotation=35, labelsize=8)
        axis.set_title(f"{name} weights")
        axis.set_ylim(0, 1.25)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("share of what the machine allows")
    axes[-1].legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write the plot here, as SVG")
    parser.add_argument("--machine", default=machine_name(), help="a folder of results")
    arguments = parser.parse_args()
    folder = RESULTS / arguments.machine
    ceilings = json.loads((folder / "linear.json").read_text())["ceilings, GB/s or G operations/s"]
    peers = json.loads((folder / "peers.json").read_text())
    tables = {w.name: rows_of(peers[f"qwen3-0.6b {w.name} openvino"], w, ceilings) for w in widths(ceilings)}
    for name, rows in tables.items():
        for scenario, engines, most in rows:
            shares = ", ".join(f"{engine} {rate:.1f} ({rate / most:.2f})" for engine, rate in engines.items())
            print(f"{name} {scenario:<24} bound {most:7.1f} tok/s: {shares}")
    if arguments.plot is not None:
        plot(tables, arguments.plot)


if __name__ == "__main__":
    main()
