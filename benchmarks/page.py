"""Generates `docs/performance.md` from the results: python benchmarks/page.py > docs/performance.md."""

import json
from collections.abc import Iterator
from typing import Any

from report import RESULTS

INTRO = """\
# Performance

The latest results of each benchmark on each machine, from `benchmarks/results/`. This page is generated:
`python benchmarks/page.py > docs/performance.md`.

The machines are virtual, with 2 processors and 24 GiB. They share memory bandwidth and caches with other tenants, so
their speed changes by the hour: compare within a table, not between tables. Python 3.11, PyTorch 2.13.0.

- **zen5**: AMD EPYC, family 26 (AVX-512 with VNNI and BF16, no AMX).
- **zen4**: AMD EPYC, family 25 (AVX-512 with VNNI and BF16, no AMX).
- **ice-lake**: Intel Xeon (AVX-512 with VNNI, neither BF16 nor AMX); results of older code.

AMX kernels are tested in an emulator and have not been timed on hardware.

Results for int8, int6 and int4 weights on zen5 and ice-lake are from before 2026-11-23, when scales were shared by 128
columns or a row. Today's smaller groups improve quality ([quantization.md](quantization.md)), and take more time where
many tokens are multiplied.

## Compared with other engines

`python benchmarks/peers.py MODEL WEIGHTS PEER`. Random weights in the shapes `qwen3-0.6b` (28 layers of 1,024,
vocabulary 151,936), `llama-1b` (16 layers of 2,048, heads of 64), `llama-8b-8l` (8 of Llama 8B's 32 layers) and `tiny`
(4 layers of 256), and of `benchmarks/real_shapes.py`: `qwen3-30b-a3b-8l` and `-4l` (8 and 4 of its 48 layers, 8 of 128
experts per token), `qwen3.5-0.8b` and `gemma3-1b`. Weights named `q4_k_m`, `q4_0` or `q8_0` are one GGUF file that
both engines read; with `/avx2`, Penstock runs the kernels of processors without AVX-512 (`--isa avx2`), the peer its
best. A scenario `NxIN:OUT` is N simultaneous requests with prompts of IN/2 to IN tokens and OUT output tokens each,
greedy; with `shared=S` all prompts have the same first S tokens. Rates are output tokens per second, or all tokens per
second for OUT = 1; medians of the rounds. OpenVINO caches keys and values in 8 bits, and so does Penstock here with
quantized weights; "other cache" is Penstock with the other type of cache. `openvino-fp16` beside int8 and
`openvino-int8` beside int4 are OpenVINO's weights that cost it no more quality than these cost Penstock
([quantization.md](quantization.md#what-it-costs-in-quality)). The ratio is Penstock's rate divided by the
peer's; for load time and memory, its seconds or bytes divided by the peer's."""

ROOFLINE = """\
## Compared with the machine's limits

![Share of the machine's limit by scenario, qwen3-0.6b on zen5](performance.svg)

`python benchmarks/roofline.py --machine zen5 --plot docs/performance.svg`: the limit is that of a perfect engine, which
computes prompts at the peak arithmetic rate, and decodes at that rate or as fast as it can read all weights, keys and
values once per step. bfloat16 weights count as 12 bits ([native-kernels.md](native-kernels.md#bfloat16-in-12-bits)).
Limits and scenarios were not measured at the same time, so a share can exceed 1."""

UNITS = {"load_s": "load, s", "peak_rss_mib": "peak memory, MiB"}
"""Names on the page for the rows of `peers.json` that are not scenarios."""

OTHERS = {  # benchmark: (title, command, remark)
    "steps": (
        "Fixed cost of a step",
        "steps.py MODEL",
        "The time outside of the native kernels, with the `tiny` shape.",
    ),
    "scheduler": ("Scheduler and prefix tree", "scheduler.py", "CPU time."),
    "sampling": ("Sampling", "sampling.py MODEL", "qwen3-0.6b's vocabulary."),
    "speculation": (
        "Speculation",
        "speculation.py MODEL",
        "Seconds with speculation divided by seconds without; below 1 is faster.",
    ),
    "edge": ("HTTP", "edge.py", ""),
    "journal": ("Journal", "journal.py", ""),
    "startup": ("Start", "startup.py", "Medians of fresh processes, demo model."),
    "load": (
        "Loading",
        "load.py MODEL",
        "From the start of a process until the model is ready, imports included. A first start packs, later ones map.",
    ),
    "memory": ("Memory", "memory.py MODEL", "qwen3-0.6b, peak of the engine process with the pool full."),
    "second_turn": (
        "A chat's second turn",
        "second_turn.py",
        "Its time to the first token divided by the first turn's; random models with each kind of cache.",
    ),
    "fairness": (
        "Fairness",
        "fairness.py --model MODEL",
        "SmolLM2-135M-Instruct, prompts of 300 tokens beside streams of 200 + 128 tokens.",
    ),
    "penalties": ("Penalties", "sampling.py", "CPU time of one thread, on a machine under load."),
    "hostile_soak": ("Hostile bytes", "hostile_soak.py", "Beside valid requests, demo model."),
    "fleet": (
        "Several engines",
        "fleet.py",
        "The rows of 0.6b: `--parts weights --model MODEL`, qwen3-0.6b's shape in bfloat16.",
    ),
    "kills": (
        "Kills under load",
        "kills.py",
        "With `PYTHONPATH=.`; demo model. One machine, whose Ray nodes are processes.",
    ),
    "shared-weights": (
        "Memory of several engines",
        "shared_weights.py MODEL --options quantization=int4",
        "Llama 8B's shape, 8 layers.",
    ),
    "simulator_speed": ("Simulator", "simulator.py speed --simulated 1200", "CPU time of one core."),
    "soak": ("Soak", "soak.py", "Mixed load, kills of the engine and aborts."),
}


def machines() -> list[str]:
    """Machines with results, the newest first."""
    return sorted((folder.name for folder in RESULTS.iterdir() if folder.is_dir()), reverse=True)


def read(machine: str, name: str) -> dict[str, Any]:
    file = RESULTS / machine / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def page() -> str:
    """The whole page."""
    lines = [INTRO]
    for machine in filter(lambda one: read(one, "peers"), machines()):
        lines += ["", f"### {machine}", "", *peer_table(read(machine, "peers"))]
    lines += ["", ROOFLINE, "", *ceiling_table()]
    for name, (title, command, remark) in OTHERS.items():
        lines += ["", f"## {title}", "", f"`python benchmarks/{command}`. {remark}".rstrip(), "", *bar_table(name)]
    return "\n".join(lines)


def peer_table(runs: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    yield "| model | weights | peer | scenario | Penstock | other cache | peer | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for run, rows in sorted(runs.items(), key=lambda entry: (not entry[0].split()[2].startswith("openvino"), entry[0])):
        model, weights, peer = run.split()
        for row, rates in sorted(rows.items(), key=lambda entry: entry[0] in UNITS):
            ours, theirs = rates.get("penstock"), rates.get(peer)
            other = next((rate for engine, rate in rates.items() if engine.startswith("penstock,")), None)
            scenario = UNITS.get(row, row.partition("  ")[0])
            ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
            cells = (model, weights, peer, scenario, _number(ours), _number(other), _number(theirs), ratio)
            yield f"| {' | '.join(cells)} |"


def ceiling_table() -> Iterator[str]:
    """Kernels as shares of the ceilings, means over the shapes."""
    yield "Kernels alone, as shares of the measured read bandwidth or arithmetic rate, whichever limits more"
    yield "(`python benchmarks/linear.py`, `python benchmarks/attention.py`):"
    yield ""
    yield f"| kernel | {' | '.join(machines())} |"
    yield f"|---|{'---|' * len(machines())}"
    shares = {m: _linear_shares(m) | read(m, "attention").get("share of the ceiling", {}) for m in machines()}
    for kernel in dict.fromkeys(name for of_machine in shares.values() for name in of_machine):
        yield f"| {kernel} | {' | '.join(_number(shares[m].get(kernel)) for m in machines())} |"


def _linear_shares(machine: str) -> dict[str, float]:
    """Shares of linear maps by kind of weight and number of tokens, means over the matrices."""
    means: dict[str, list[float]] = {}
    for name, share in read(machine, "linear").get("share of the nearer ceiling", {}).items():
        kind, _, tokens = name.split(" ", 2)
        if tokens.split()[0] in ("1", "8", "64", "512"):
            means.setdefault(f"linear, {kind}, {tokens.replace('1 tokens', '1 token')}", []).append(share)
    return {name: sum(found) / len(found) for name, found in means.items()}


def bar_table(name: str) -> Iterator[str]:
    having = [machine for machine in machines() if read(machine, name)]
    yield f"| | {' | '.join(having)} | target |"
    yield f"|---|{'---|' * (len(having) + 1)}"
    results = {machine: read(machine, name) for machine in having}
    for row in dict.fromkeys(row for rows in results.values() for row in rows):
        entries = [results[machine].get(row, {}) for machine in having]
        bar = next((entry["bar"] for entry in entries if entry.get("bar") is not None), None)
        yield f"| {row} | {' | '.join(_number(entry.get('value')) for entry in entries)} | {_number(bar)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


if __name__ == "__main__":
    print(page())
