"""The plot of docs/quantization.md: perplexity against size and speed of Penstock's and its peers' forms.

    python benchmarks/quality_plot.py [--measure MODEL]

Perplexity and bits are those of SmolLM2-135M-Instruct: results/<machine>/quality.json (`benchmarks/quality.py`) and, of
peers that did not run there, the kit's README. Speed, where it was measured, is that of random weights in MODEL, which
the kit wrote (`make_model.py --shape qwen3-0.6b --openvino int8,int4 --gguf q8_0,q4_k_m`), by its `compare.py`. It
goes to results/<machine>/quality-speed.json. This writes docs/quality.svg, which needs matplotlib.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import results_file, save

KIT = Path(__file__).parents[2] / "shared" / "peers" / "compare.py"
TARGET = Path(__file__).parents[1] / "docs" / "quality.svg"
LEAST = 0.04  # per cent, the lowest point of the logarithmic axis
SCENARIOS = {"batch 1": "1x32:24", "batch 8": "8x32:24"}


@dataclass(frozen=True, slots=True)
class Form:
    """One way to store a model."""

    label: str
    ours: bool
    mib: float
    """Of SmolLM2-135M-Instruct."""
    quality: str | float
    """Row of quality.json, or per cent of perplexity over float32's."""
    engine: str | None = None
    """The kit's name, where speed is measured."""
    raised: int = 0
    """Points by which the label is above its dot."""


FORMS = (
    Form("bfloat16", True, 257, "penstock bf16", "penstock"),
    Form("int8", True, 146, "penstock quantization=int8", "penstock-quantization=int8"),
    Form("int4", True, 80, "penstock quantization=int4", "penstock-quantization=int4"),
    Form("quantize int4", True, 79, "penstock q-int4"),
    Form("quantize int6", True, 98, "penstock q-int6"),
    Form("the package's Q4_1", True, 94, "penstock SmolLM2-135M-Instruct.Q4_1"),
    Form("llama.cpp, the package's Q4_1", False, 94, "llama.cpp SmolLM2-135M-Instruct.Q4_1", raised=-10),
    Form("llama.cpp Q8_0", False, 138, 0.70, "llamacpp-q8_0", 6),
    Form("llama.cpp Q4_K_M", False, 101, 4.5, "llamacpp-q4_k_m"),
    Form("llama.cpp Q4_0", False, 88, 28.0, raised=4),
    Form("OpenVINO int8", False, 131, 0.61, "openvino-int8", -1),
    Form("OpenVINO int4 by 32", False, 88, 23.0, "openvino-int4", -4),
)


def measure(model: str) -> None:
    """Tokens a second of every form that has an engine: medians of two rounds that take turns."""
    engines = [form.engine for form in FORMS if form.engine is not None]
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


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    from matplotlib import pyplot

    perplexity = json.loads(results_file("quality").read_text())
    file = results_file("quality-speed")
    speed = json.loads(file.read_text()) if file.exists() else {}
    placed = points(perplexity)
    panels = {"MiB of weights": [(form, form.mib, loss) for form, loss in placed]}
    for name, rates in speed.items():
        panels[f"tokens per second, {name}"] = [
            (form, rates[form.engine], loss) for form, loss in placed if form.engine in rates
        ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, 4.6), sharey=True, squeeze=False)
    for axis, (unit, dots) in zip(axes[0], panels.items(), strict=True):
        widest = max(x for _, x, _ in dots)
        for form, x, loss in dots:
            colour, left = ("tab:blue" if form.ours else "tab:red"), x > 0.6 * widest
            axis.plot(x, max(loss, LEAST), "o", color=colour, markersize=5)
            axis.annotate(form.label, (x, max(loss, LEAST)), (-7 if left else 7, form.raised), color=colour, fontsize=8,
                          textcoords="offset points", ha="right" if left else "left", va="center")  # fmt: skip
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g} %")
        axis.set_xlim(0, 1.08 * widest)
        axis.set_xlabel(unit)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("perplexity above float32's")
    figure.tight_layout()
    figure.savefig(TARGET, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="MODEL")
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure)
    draw()


if __name__ == "__main__":
    main()
