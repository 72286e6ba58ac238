"""The plot of docs/performance.md and the README: how many times as fast as its peers Penstock is.

    python -m benchmarks.speed.peers_plot

Reads the results of `peers.py` on one machine and writes docs/performance.svg, which needs matplotlib. A bar is the
ratio of two rates that were measured in turns, so that what else the machine did weighs on both.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS
from benchmarks.speed.scenarios import Scenario

TARGET = Path(__file__).parents[2] / "docs" / "performance.svg"
MACHINE = "zen4"
PANELS = {
    "bfloat16 weights": ("bf16 openvino",),
    "8-bit weights": ("int8 openvino", "q8_0 llamacpp"),
    "4-bit weights": ("int4 openvino", "q4_k_m llamacpp"),
}
"""Runs of qwen3-0.6b by panel."""
NAMES = {"openvino": "OpenVINO", "llamacpp": "llama.cpp"}
COLOURS = {"openvino": "#3b6fb6", "llamacpp": "#d9822b"}
NOTES = {"q8_0": "Q8_0 file", "q4_k_m": "Q4_K_M file"}
BAR = 0.38
"""Of the height of a scenario's row."""


def ratios(runs: dict[str, dict[str, dict[str, float]]], run: str) -> dict[Scenario, tuple[float, float]]:
    """Tokens a second of Penstock and of the peer."""
    peer = run.split()[1]
    rows = runs[f"qwen3-0.6b {run}"]
    rates = {Scenario.parse(row): (rates["penstock"], rates[peer]) for row, rates in rows.items() if "tok/s" in row}
    return dict(sorted(rates.items(), key=lambda entry: (entry[0].output == 1, entry[0].streams)))


def draw_panel(axis: Any, title: str, measured: dict[str, dict[Scenario, tuple[float, float]]]) -> None:
    scenarios = list(dict.fromkeys(scenario for rates in measured.values() for scenario in rates))
    for index, (run, rates) in enumerate(measured.items()):
        peer = run.split()[1]
        for scenario, (ours, theirs) in rates.items():
            y = scenarios.index(scenario) + (index - (len(measured) - 1) / 2) * BAR
            axis.barh(y, ours / theirs, BAR * 0.9, color=COLOURS[peer])
            label(axis, ours / theirs, y, 4, f"{ours / theirs:.1f}×", fontsize=10, fontweight="bold")
            label(axis, ours / theirs, y, 36, f"{ours:.0f} vs {theirs:.0f} tokens/s", fontsize=8, color="#666666")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(scenarios)), [scenario.brief for scenario in scenarios])
    axis.set_ylim(len(scenarios) - 0.4, -0.6)
    axis.set_xlim(0, 7)
    axis.set_xticks([0, 1, 2, 3, 4], ["0", "1\nequal", "2", "3", "4"])
    files = " and ".join(NOTES[run.split()[0]] for run in measured if run.split()[0] in NOTES)
    axis.set_title(f"{title}{f' (llama.cpp: {files})' if files else ''}", fontsize=10, loc="left")
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def label(axis: Any, x: float, y: float, points: float, text: str, **style: Any) -> None:
    """Text that begins this many points to the right of a bar's end."""
    axis.annotate(text, (x, y), (points, 0), textcoords="offset points", va="center", **style)


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    from matplotlib import pyplot

    runs = json.loads((RESULTS / MACHINE / "peers.json").read_text())
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(14, 4.2))
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        draw_panel(axis, title, {name: ratios(runs, name) for name in names})
    figure.suptitle("How many times as fast as its peers Penstock is:", x=0.012, y=0.975, ha="left", fontsize=12)
    for peer, x in zip(COLOURS, (0.310, 0.386), strict=True):
        figure.text(x, 0.975, NAMES[peer], color=COLOURS[peer], fontsize=12, fontweight="bold", va="top")
    figure.text(
        0.012,
        0.885,
        "Two cores of an AMD Zen 4, a model of Qwen3-0.6B's shape. Beside each bar: its length, and both rates.",
        fontsize=9,
        color="#666666",
    )
    figure.tight_layout(rect=(0, 0, 1, 0.89))
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    draw()
