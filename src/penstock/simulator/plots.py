"""Plots latencies by the number of engines."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.simulator.summary import Summary
from penstock.simulator.sweep import Objective

TITLES = {"ttft": "time to first token", "itl": "inter-token latency", "e2e": "end to end"}


def check_plots() -> None:
    """
    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install '.[plots]' in Penstock's source folder")


def plot(summaries: Sequence[Summary], objectives: Sequence[Objective], path: Path) -> None:
    """Write P50, P90 and P99 of each simulation to an SVG, PNG or PDF file, by its name's ending.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    check_plots()
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    lines: dict[str, list[Summary]] = {}
    for summary in summaries:
        label = f"{summary.router}, {summary.max_num_batched_tokens} tokens a step, {summary.max_num_seqs} sequences"
        lines.setdefault(label, []).append(summary)
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        for place, (label, row) in enumerate(lines.items()):
            row.sort(key=lambda summary: summary.engines)
            engines = [summary.engines for summary in row]
            for share, style in (("p50", ":"), ("p90", "-"), ("p99", "--")):
                values = [getattr(getattr(summary, name), share) for summary in row]
                legend = label if share == "p90" else None
                axis.plot(engines, values, style, color=f"C{place}", marker="o", markersize=3, label=legend)
        for objective in objectives:
            if objective.what == name:
                axis.axhline(objective.seconds, color="black", linewidth=0.8)
        axis.set_title(f"{title}: P50 dotted, P90, P99 dashed", fontsize=9)
        axis.set_xlabel("engines")
        axis.set_ylabel("seconds")
        axis.set_yscale("log")
        axis.set_xticks(sorted({summary.engines for summary in summaries}))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
        axis.grid(which="both", alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from None
    finally:
        pyplot.close(figure)
