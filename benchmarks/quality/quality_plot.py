"""The plot of docs/quantization.md: perplexity against size and speed of Penstock's and its peers' forms.

    python -m benchmarks.quality.quality_plot [--measure MODEL] [--machine zen4]

Perplexity and bits are those of SmolLM2-135M-Instruct: results/<machine>/quality.json (`benchmarks/quality/quality.py`)
and, of peers that did not run there, the kit's README. Speed, where it was measured, is that of random weights in
MODEL, which the kit wrote (`make_model.py --shape qwen3-0.6b --openvino int8,int4 --gguf q8_0,q4_k_m`), by its
`compare.py`. It goes to results/<machine>/quality-speed.json. This writes docs/quality.svg, which needs matplotlib.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RESULTS, machine_name, save

KIT = Path(__file__).parents[3] / "shared" / "peers" / "compare.py"
TARGET = Path(__file__).parents[2] / "docs" / "quality.svg"
LEAST = 0.04  # per cent, the lowest point of the logarithmic axis
SCENARIOS = {"batch 1": "1x32:24", "batch 8": "8x32:24"}
STREAMS = {"batch 1": "1 stream", "batch 8": "8 streams"}


COLOURS = {"Penstock": "#2a9d5c", "llama.cpp": "#d9822b", "OpenVINO": "#3b6fb6"}


@dataclass(frozen=True, slots=True)
class Form:
    """One way to store a model."""

    engine: str
    label: str
    mib: float
    """Of SmolLM2-135M-Instruct."""
    quality: str | float
    """Row of quality.json, or per cent of perplexity over float32's."""
    timed_as: str | None = None
    """The kit's name, where speed is measured."""
    beside: tuple[int, int] = (7, 0)
    """Points from the dot to its label: to the right, or to the left if negative; and upwards."""
    beside_speed: tuple[int, int] | None = None
    """The same in the panels of speed, if it differs there."""


FORMS = (
    Form("Penstock", "bfloat16", 257, "penstock bf16", "penstock", (-7, 0), (7, 0)),
    Form("Penstock", "int8", 146, "penstock quantization=int8", "penstock-quantization=int8"),
    Form("Penstock", "int4", 80, "penstock quantization=int4", "penstock-quantization=int4", (-7, 3), (-7, 0)),
    Form("Penstock", "int4 by penstock quantize", 79, "penstock q-int4", beside=(7, -4)),
    Form("Penstock", "int6 by penstock quantize", 98, "penstock q-int6"),
    Form("Penstock", "SmolLM2's own\nQ4_1 file", 94, "penstock SmolLM2-135M-Instruct.Q4_1", beside=(-7, 0)),
    Form("llama.cpp", "SmolLM2's own\nQ4_1 file", 94, "llama.cpp SmolLM2-135M-Instruct.Q4_1", beside=(-7, 0)),
    Form("llama.cpp", "Q8_0", 138, 0.70, "llamacpp-q8_0", (7, 6)),
    Form("llama.cpp", "Q4_K_M", 101, 4.5, "llamacpp-q4_k_m"),
    Form("llama.cpp", "Q4_0", 88, 28.0, beside=(7, 5)),
    Form("OpenVINO", "int8", 131, 0.61, "openvino-int8", (7, -7)),
    Form("OpenVINO", "int4", 88, 23.0, "openvino-int4", (7, -6), (-7, 0)),
)


def measure(model: str) -> None:
    """Tokens a second of every form that has an engine: medians of two rounds that take turns."""
    engines = [form.timed_as for form in FORMS if form.timed_as is not None]
    with tempfile.TemporaryDirectory() as folder:
        medians = Path(folder) / "medians.json"
        command = [sys.executable, str(KIT), "--model", model, "--engines", ";".join(engines), "--rounds", "2"]
        command += ["--scenarios", " ".join(SCENARIOS.values()), "--project", sys.executable, "--json", str(medians)]
        subprocess.run(command, check=True)
        rows = json.loads(medians.read_text())
    save("quality-speed", {name: rows[f"{scenario}  out tok/s"] for name, scenario in SCENARIOS.items()})


def points(perplexity: dict[str, dict[str, float]]) -> list[tuple[Form, float]]:
    """Each form with per cent of perplexity over float32's."""
    found = []
    for form in FORMS:
        loss = form.quality if isinstance(form.quality, float) else perplexity[form.quality]["over float32 %"]
        found.append((form, loss))
    return found


def draw(machine: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    from matplotlib import pyplot

    perplexity = json.loads((RESULTS / machine / "quality.json").read_text())
    file = RESULTS / machine / "quality-speed.json"
    speed = json.loads(file.read_text()) if file.exists() else {}
    placed = points(perplexity)
    panels = {"MiB of weights (smaller is better)": [(form, form.mib, loss) for form, loss in placed]}
    for name, rates in speed.items():
        panels[f"tokens per second, {STREAMS[name]} (more is better)"] = [
            (form, rates[form.timed_as], loss) for form, loss in placed if form.timed_as in rates
        ]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(14, 5), sharey=True, squeeze=False, width_ratios=[1.5, *[1] * (len(panels) - 1)]
    )
    for axis, (unit, dots) in zip(axes[0], panels.items(), strict=True):
        for form, x, loss in dots:
            colour = COLOURS[form.engine]
            right, up = form.beside_speed if axis is not axes[0][0] and form.beside_speed else form.beside
            axis.plot(x, max(loss, LEAST), "o", color=colour, markersize=6)
            axis.annotate(form.label, (x, max(loss, LEAST)), (right, up), color=colour, fontsize=9,
                          textcoords="offset points", ha="left" if right > 0 else "right", va="center")  # fmt: skip
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g} %")
        axis.set_xlim(0, 1.2 * max(x for _, x, _ in dots))
        axis.set_xlabel(unit)
        axis.grid(axis="y", alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0][0].set_ylabel("perplexity above float32's (lower is better)")
    figure.text(0.012, 0.975, "Accuracy lost by the formats of", fontsize=12, va="top")
    for engine, x in zip(COLOURS, (0.204, 0.274, 0.344), strict=True):
        figure.text(x, 0.975, engine, color=COLOURS[engine], fontsize=12, fontweight="bold", va="top")
    rates = next(iter(speed.values()), {})
    untimed = ", ".join(dict.fromkeys(form.label.replace("\n", " ") for form in FORMS if form.timed_as not in rates))
    note = "Perplexity and size: SmolLM2-135M-Instruct. Speed: Qwen3-0.6B's shape, two cores of an AMD Zen 4"
    note += f" (not measured: {untimed})." if untimed else "."
    figure.text(0.012, 0.925, note, fontsize=8, color="#666666", va="top")
    figure.tight_layout(rect=(0, 0, 1, 0.91))
    figure.savefig(TARGET, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="MODEL")
    parser.add_argument("--machine", default=machine_name(), help="a folder of results")
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure)
    draw(args.machine)


if __name__ == "__main__":
    main()
