"""The plot of docs/quantization.md: perplexity against size and speed of Penstock's and its peers' forms.

    python benchmarks/quality_plot.py [--measure MODEL]

Perplexity and bits are those of SmolLM2-135M-Instruct: results/<machine>/quality.json (`benchmarks/quality.py`) and, of
peers that did not run there, the kit's README. Speed, where it was measured, is that of random weights in MODEL, which
the kit wrote (`make_model.py --shape qwen3-0.6b --gguf q8_0,q4_k_m`), by the kit's `compare.py`, and goes to
results/<machine>/quality-speed.json. Writes docs/quality.svg.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import results_file, save

KIT = Path(__file__).parents[2] / "shared" / "peers" / "compare.py"
TARGET = Path(__file__).parents[1] / "docs" / "quality.svg"
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


FORMS = (
    Form("bfloat16", True, 257, "penstock bf16", "penstock"),
    Form("int8", True, 146, "penstock quantization=int8", "penstock-quantization=int8"),
    Form("int4", True, 80, "penstock quantization=int4", "penstock-quantization=int4"),
    Form("quantize int4", True, 79, "penstock q-int4"),
    Form("quantize int6", True, 98, "penstock q-int6"),
    Form("the package's Q4_1", True, 94, "penstock SmolLM2-135M-Instruct.Q4_1"),
    Form("llama.cpp, the package's Q4_1", False, 94, "llama.cpp SmolLM2-135M-Instruct.Q4_1"),
    Form("llama.cpp Q8_0", False, 138, 0.70, "llamacpp-q8_0"),
    Form("llama.cpp Q4_K_M", False, 101, 4.5, "llamacpp-q4_k_m"),
    Form("llama.cpp Q4_0", False, 88, 28.0),
    Form("OpenVINO int8", False, 131, 0.61),
    Form("OpenVINO int4 by 32", False, 88, 23.0),
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 300, 300, 46, 34, 44


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


def panel(title: str, unit: str, at: int, dots: list[tuple[str, bool, float, float]]) -> list[str]:
    """One diagram, `at` pixels from the left: dots of (label, ours, x, per cent); per cent on a logarithmic scale."""
    largest = max(x for _, _, x, _ in dots) * 1.08
    low, high = math.log10(0.04), math.log10(40)

    def place(x: float, loss: float) -> tuple[float, float]:
        y = TOP + (high - math.log10(max(loss, 0.05))) / (high - low) * HEIGHT
        return at + LEFT + x / largest * WIDTH, y

    lines = [f'<text x="{at + LEFT}" y="20" class="title">{title}</text>']
    for loss in (0.1, 1, 10):
        x, y = place(0, loss)
        lines.append(f'<path d="M{x:.0f} {y:.0f}h{WIDTH}" class="grid"/><text x="{x - 6:.0f}" y="{y + 4:.0f}" '
                     f'text-anchor="end">{loss:g} %</text>')  # fmt: skip
    for part in range(5):
        x, _ = place(largest * part / 4, 1)
        value = largest * part / 4
        lines.append(f'<text x="{x:.0f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{value:.0f}</text>')
    lines.append(f'<text x="{at + LEFT + WIDTH / 2:.0f}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{unit}</text>')
    taken: list[tuple[float, float]] = []
    for label, ours, value, loss in sorted(dots, key=lambda dot: -dot[3]):
        x, y = place(value, loss)
        text_y = y + 4
        while any(abs(text_y - other_y) < 11 and abs(x - other_x) < 130 for other_x, other_y in taken):
            text_y += 11
        taken.append((x, text_y))
        left = x > at + LEFT + WIDTH * 0.6
        text_x, anchor = (x - 8, "end") if left else (x + 8, "start")
        kind = "ours" if ours else "peer"
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/><text x="{text_x:.1f}" '
                     f'y="{text_y:.1f}" text-anchor="{anchor}" class="{kind}">{label}</text>')  # fmt: skip
    return lines


def draw() -> str:
    perplexity = json.loads(results_file("quality").read_text())
    file = results_file("quality-speed")
    speed = json.loads(file.read_text()) if file.exists() else {}
    placed = points(perplexity)
    lines = panel("Perplexity over float32's, by size", "MiB of weights", 0,
                  [(form.label, form.ours, form.mib, loss) for form, loss in placed])  # fmt: skip
    for index, (name, rates) in enumerate(speed.items()):
        dots = [(form.label, form.ours, rates[form.engine], loss) for form, loss in placed if form.engine in rates]
        lines += panel(f"by speed, {name}", "tokens a second", (index + 1) * (WIDTH + LEFT + 10), dots)
    width, height = (1 + len(speed)) * (WIDTH + LEFT + 10) + 10, TOP + HEIGHT + BOTTOM
    style = (
        "text{font:11px sans-serif;fill:#333}.title{font-weight:bold;font-size:13px}.grid{stroke:#ddd}"
        "circle.ours{fill:#0a58ca}circle.peer{fill:#c2410c}text.ours{fill:#0a58ca}text.peer{fill:#c2410c}"
    )
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    back = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([start, f"<style>{style}</style>", back, *lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="MODEL")
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure)
    TARGET.write_text(draw())


if __name__ == "__main__":
    main()
