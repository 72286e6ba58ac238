"""Generates `docs/performance.md` from the results: python -m benchmarks.page > docs/performance.md."""

from collections.abc import Callable, Iterator

from benchmarks.light_page import LIGHT, SETS, install_rows, light_notes, light_table, set_name, sets_table
from benchmarks.report import RESULTS
from benchmarks.speed import roofline
from benchmarks.speed.scenarios import Scenario
from benchmarks.tables import number, read, times

INTRO = """\
# Performance

The newest results of each benchmark on each machine, from `benchmarks/results/`. This page is generated: `python -m
benchmarks.page > docs/performance.md`.

## Summary

Penstock divided by another engine on the same machine, from the lowest to the highest of all models and weights that
were compared ([the single results](#compared-with-other-engines)). For **speed, above 1 is better**: 2 is twice as
many tokens per second. For load time and memory, **below 1 is better**: Penstock starts more slowly than llama.cpp,
and needs more memory than it in most cases."""

PLOT = """\
![Tokens per second as a multiple of OpenVINO's and llama.cpp's, on zen4](performance.svg)

`python -m benchmarks.speed.peers_plot` draws this from the results of zen4: Qwen3-0.6B's shape in each kind of weights.
llama.cpp reads the same GGUF file as Penstock, OpenVINO its own weights of as many bits.

## Machines

The machines are virtual, with 2 processors and 24 GiB. They share memory bandwidth and caches with other tenants, so
their speed changes by the hour: compare within a table, not between tables. Python 3.11, PyTorch 2.13.0.

- **zen4**: AMD EPYC, family 25 (AVX-512 with VNNI and BF16, no AMX).
- **zen5**: AMD EPYC, family 26 (AVX-512 with VNNI and BF16, no AMX).
- **ice-lake**: Intel Xeon (AVX-512 with VNNI, neither BF16 nor AMX); results of older code.
- **granite-rapids**: Intel Xeon with 480 MB of L3 (AVX-512 with VNNI, BF16 and FP16, AVX-VNNI, AMX); its hypervisor
  hides the model.

Results for int8, int6 and int4 weights on zen5 and ice-lake are from before 2026-11-23, when scales were shared by
128 columns or a row. Today's smaller groups improve quality ([quantization.md](quantization.md)), and take more time
where many tokens are multiplied. Results for AVX2 on zen4 are from before 2026-11-27, and of older
loops of integers."""

COMPARED = """\
## Compared with other engines

`python -m benchmarks.speed.peers MODEL WEIGHTS PEER`. The two engines take turns, and each figure is the median of the
rounds.

- **Scenarios**: "8 streams: 64 in, 64 out" is 8 simultaneous requests with prompts of 32 to 64 tokens and 64 output
  tokens each, greedy; the rate is output tokens per second. With "384 shared" all prompts begin with the same 384
  tokens. For "1,024-token prompt" one token is generated, and the rate is prompt tokens per second.
- **Models**: random weights in the shapes of Qwen3-0.6B, of a Llama with 1 B parameters (`llama-1b`), of 8 of Llama
  8B's 32 layers (`llama-8b-8l`), of 8 and 4 of Qwen3-30B-A3B's 48 layers, of Qwen3.5-0.8B and Gemma3-1B, and `tiny`
  (4 layers of 256). `benchmarks/speed/real_shapes.py` makes the last but `tiny`.
- **Weights**: `q4_k_m`, `q4_0` and `q8_0` are one GGUF file that both engines read. With `/avx2` both run
  what they have for processors without AVX-512 (`--isa avx2`). `openvino-fp16` beside int8 and
  `openvino-int8` beside int4 are OpenVINO's weights that lose no more accuracy than Penstock's do
  ([quantization.md](quantization.md#accuracy)).
- **Caches**: OpenVINO stores keys and values in 8 bits, Penstock in 8 bits with quantized weights and 16 otherwise."""

ROOFLINE = """\
## Compared with the machine's limits

`python -m benchmarks.speed.roofline --machine zen5`: Penstock's rate as a share of a perfect engine's, in brackets
OpenVINO's. A perfect engine computes prompts at the peak arithmetic rate, and decodes at that rate or as fast as it
can read all weights, keys and values once per step. bfloat16 weights count as 12 bits
([native-kernels.md](native-kernels.md#bfloat16-in-12-bits)). Limits and scenarios were not measured at the same time,
so a share can exceed 1. Qwen3-0.6B's shape, higher is better:"""

ALONE = """\
## Penstock alone

Where the last column has a number, lower is better, and the benchmark fails above that number. Rows without one are for
information."""

PEERS = {
    "llamacpp": "llama.cpp",
    "openvino": "OpenVINO",
    "openvino-fp16": "OpenVINO fp16",
    "openvino-int8": "OpenVINO int8",
    "vllm": "vLLM",
}
SPEEDS: dict[str, Callable[[Scenario], bool]] = {
    "1 stream": lambda one: one.output > 1 and one.streams == 1,
    "8 streams": lambda one: one.output > 1 and one.streams == 8,
    "24 to 64 streams": lambda one: one.output > 1 and one.streams > 8 and not one.shared,
    "long prompt": lambda one: one.output == 1,
}
"""Columns of the summary, of the rows of `peers.json` that are scenarios."""
COSTS = {"load_s": "load time", "peak_rss_mib": "peak memory"}
"""Columns of the summary, of the other rows."""
NEWEST = "zen4"
"""The machine with results of today's code."""

OTHERS = {  # benchmark: (title, command, remark)
    "steps": (
        "Fixed cost of a step",
        "speed.steps MODEL",
        "The time outside of the native kernels, with the `tiny` shape.",
    ),
    "scheduler": ("Scheduler and prefix tree", "speed.scheduler", "CPU time."),
    "sampling": ("Sampling", "speed.sampling MODEL", "qwen3-0.6b's vocabulary."),
    "speculation": (
        "Speculation",
        "speed.speculation MODEL",
        "Seconds with speculation divided by seconds without; below 1 is faster.",
    ),
    "edge": ("HTTP", "speed.edge", ""),
    "journal": ("Journal", "speed.journal", ""),
    "startup": ("Start", "speed.startup", "Medians of fresh processes; the server has the demo model."),
    "starts": (
        "Speed from start to start",
        "speed.starts MODEL --options quantization=int8",
        "One stream in fresh processes, of which the first packs the weights.",
    ),
    "extras": (
        "Extras",
        "speed.install --extras all",
        "What each of the [extras](dependencies.md#extras) adds to a plain install.",
    ),
    "many_models": (
        "A second model",
        "speed.many_models FIRST SECOND",
        "SmolLM2 (Q4_1) streams while a model of Qwen3-0.6B's shape in bfloat16 loads, with its packed weights cached.",
    ),
    "load": (
        "Loading",
        "speed.load MODEL",
        "From the start of a process until the model is ready, imports included. A first start packs, later ones map.",
    ),
    "memory": ("Memory", "speed.memory MODEL", "qwen3-0.6b, peak of the engine process with the pool full."),
    "second_turn": (
        "A chat's second turn",
        "speed.second_turn",
        "Its time to the first token divided by the first turn's; random models with each kind of cache.",
    ),
    "fairness": (
        "Fairness",
        "robustness.fairness --model MODEL",
        "SmolLM2-135M-Instruct, prompts of 300 tokens beside streams of 200 + 128 tokens.",
    ),
    "penalties": ("Penalties", "speed.sampling", "CPU time of one thread, on a machine under load."),
    "hostile_soak": ("Hostile bytes", "robustness.hostile_soak", "Beside valid requests, demo model."),
    "fleet": (
        "Several engines",
        "speed.fleet",
        "The rows of 0.6b: `--parts weights --model MODEL`, qwen3-0.6b's shape in bfloat16.",
    ),
    "kills": (
        "Kills under load",
        "robustness.kills",
        "Demo model. One machine, whose Ray nodes are processes.",
    ),
    "shared-weights": (
        "Memory of several engines",
        "speed.shared_weights MODEL --options quantization=int4",
        "Llama 8B's shape, 8 layers.",
    ),
    "simulator_speed": ("Simulator", "speed.simulator speed --simulated 1200", "CPU time of one core."),
    "soak": ("Soak", "robustness.soak", "Mixed load, kills of the engine and aborts."),
}


def machines() -> list[str]:
    """Machines with results: that of today's code, then the newest first."""
    return sorted((f.name for f in RESULTS.iterdir() if f.is_dir()), key=lambda name: (name == NEWEST, name))[::-1]


def page() -> str:
    """The whole page."""
    lines = [INTRO, "", *summary_table(), "", PLOT, ""]
    lines += [LIGHT.format(machine=NEWEST), "", *light_table(NEWEST), "", *light_notes(NEWEST)]
    if read(NEWEST, "instruction_sets"):
        lines += ["", SETS, "", *sets_table(NEWEST)]
    lines += ["", COMPARED]
    for machine in filter(lambda one: read(one, "peers"), machines()):
        runs = read(machine, "peers")
        lines += ["", f"### {machine}: tokens per second (higher is better)", "", *rate_table(runs)]
        lines += ["", f"### {machine}: load time and memory (lower is better)", "", *cost_table(runs)]
    lines += ["", ROOFLINE, "", *limit_table("zen5"), "", *ceiling_table()]
    lines += ["", ALONE]
    for name in filter(lambda one: any(read(machine, one) for machine in machines()), OTHERS):
        title, command, remark = OTHERS[name]
        lines += ["", f"### {title}", "", f"`python -m benchmarks.{command}`. {remark}".rstrip(), "", *bar_table(name)]
    return "\n".join(lines)


Runs = dict[str, dict[str, dict[str, float]]]


def ratios(runs: Runs, peer: str, column: str, kernels: str = "") -> list[float]:
    """Penstock's figures divided by a peer's, of all models and weights.

    Args:
        kernels: the lesser instruction set that Penstock ran on, if it did.
    """
    found = []
    for run, rows in runs.items():
        _, weights, other = run.split()
        if other == peer and weights.partition("/")[2] == kernels:
            for row, figures in rows.items():
                is_wanted = row == column if row in COSTS else column in SPEEDS and SPEEDS[column](Scenario.parse(row))
                if is_wanted and peer in figures and "penstock" in figures:
                    found.append(figures["penstock"] / figures[peer])
    return found


def span(found: list[float]) -> str:
    """From the lowest to the highest, to a tenth, or to a hundredth if that is little."""
    low, high = (f"{figure:.1f}" if figure > 0.1 else f"{figure:.2f}" for figure in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def summary_table() -> Iterator[str]:
    yield f"| compared with, on | {' | '.join([*SPEEDS, *COSTS.values()])} |"
    yield f"|---|{'---|' * (len(SPEEDS) + len(COSTS))}"
    kinds = {
        (run.split()[2], machine, run.split()[1].partition("/")[2])
        for machine in machines()
        for run in read(machine, "peers")
    }
    ranks = [*PEERS, *machines()]
    for peer, machine, kernels in sorted(kinds, key=lambda kind: (ranks.index(kind[0]), ranks.index(kind[1]), kind[2])):
        if "-" not in peer:
            cells = (ratios(read(machine, "peers"), peer, column, kernels) for column in (*SPEEDS, *COSTS))
            name = f"{PEERS[peer]}, {machine}{f', both on {set_name(kernels)}' if kernels else ''}"
            yield f"| {name} | {' | '.join(span(found) if found else '' for found in cells)} |"


def claims() -> list[str]:
    """What the README says of the results, in its words."""
    runs = read(NEWEST, "peers")
    single, batch = (span(ratios(runs, "llamacpp", column)) for column in ("1 stream", "8 streams"))
    latest = read("granite-rapids", "peers")  # the only results of AMX, and the newest of AVX2
    narrow = [span(ratios(latest, "llamacpp", column, "avx2")) for column in ("1 stream", "8 streams", "long prompt")]
    beside = span(ratios(runs, "openvino", "1 stream") + ratios(runs, "openvino", "8 streams"))
    more = span(ratios(runs, "openvino", "24 to 64 streams"))
    long, load = span(ratios(runs, "llamacpp", "long prompt")), span(ratios(runs, "llamacpp", "load_s"))
    vllm = read("zen5", "peers")
    speeds = ", ".join(span(ratios(vllm, "vllm", column)) for column in ("1 stream", "8 streams", "long prompt"))
    amx = {
        weights: ratios({run: latest[run]}, "openvino", "long prompt")[0]
        for weights in ("bf16", "int8")
        for run in [f"qwen3-0.6b {weights} openvino"]
    }
    kills = read(NEWEST, "kills")
    answers = kills["engines killed under 64 streams: answers told right"]["value"]
    assert not any(
        kills[f"engines killed under 64 streams: answers {kind}"]["value"] for kind in ("lost", "repeated", "changed")
    )
    return [
        *installed_claims(),
        f"{single} times as fast as llama.cpp with one stream and {batch} times with eight",
        f"{beside} times as fast as OpenVINO with one or eight streams ({more} with 24 and more",
        f"| {single}, {batch}, {long} | uses llama.cpp | {speeds} (bfloat16, Zen 5) |",
        f"with AVX2 (there {narrow[0]} times as fast as llama.cpp with one stream, {narrow[1]} with eight, "
        f"{narrow[2]} in long prompts)",
        f"reads long prompts {amx['bf16']:.1f} times as fast as OpenVINO with bfloat16 weights and "
        f"{amx['int8']:.1f} times with int8",
        f"| {load} | uses llama.cpp | {span(ratios(vllm, 'vllm', 'load_s'))} |",
        f"none of {answers:,.0f} answers was lost, repeated or changed",
    ]


def installed_claims() -> list[str]:
    install = {row: entry["value"] for row, entry in install_rows(NEWEST).items()}
    return [
        f"takes {install['pip install of a clone, s']:.0f} seconds on two idle cores",
        f"downloads {install['download of a plain install, MB']:.0f} MB and takes "
        f"{install['disk of a plain install, MB']:.0f} MB of disk",
    ]


def in_order(runs: Runs) -> Iterator[tuple[str, str, str, dict[str, dict[str, float]]]]:
    """Model, weights, peer and rows."""
    order = list(PEERS)
    for run in sorted(runs, key=lambda run: (order.index(run.split()[2]), run)):
        model, weights, peer = run.split()
        yield model, weights, peer, runs[run]


def rate_table(runs: Runs) -> Iterator[str]:
    yield "| model | weights | peer | scenario | Penstock | peer | times as fast |"
    yield "|---|---|---|---|---|---|---|"
    for model, weights, peer, rows in in_order(runs):
        scenarios = {Scenario.parse(row): rates for row, rates in rows.items() if row not in COSTS}
        for scenario in sorted(scenarios, key=lambda one: (one.output == 1, one.streams, one.shared)):
            ours, theirs = (scenarios[scenario].get(engine) for engine in ("penstock", peer))
            cells = (model, weights, PEERS[peer], scenario.words, number(ours), number(theirs), times(ours, theirs))
            yield f"| {' | '.join(cells)} |"


def cost_table(runs: Runs) -> Iterator[str]:
    yield "| model | weights | peer | load, s: Penstock | peer | peak memory, MiB: Penstock | peer |"
    yield "|---|---|---|---|---|---|---|"
    for model, weights, peer, rows in in_order(runs):
        cells = [model, weights, PEERS[peer]]
        for row in COSTS:
            pair = [rows.get(row, {}).get(engine) for engine in ("penstock", peer)]
            least = min((figure for figure in pair if figure is not None), default=None)
            cells += [
                f"**{number(figure)}**" if figure is not None and figure == least else number(figure) for figure in pair
            ]
        yield f"| {' | '.join(cells)} |"


def limit_table(machine: str) -> Iterator[str]:
    tables = roofline.tables(machine)
    yield f"| scenario | {' | '.join(tables)} |"
    yield f"|---|{'---|' * len(tables)}"
    for index, (scenario, _, _) in enumerate(next(iter(tables.values()))):
        found = [rows[index] for rows in tables.values()]
        shares = [(rates["penstock"] / most, rates["openvino"] / most) for _, rates, most in found]
        cells = (f"{ours:.2f} ({theirs:.2f})" for ours, theirs in shares)
        yield f"| {Scenario.parse(scenario).words} | {' | '.join(cells)} |"


def ceiling_table() -> Iterator[str]:
    """Kernels as shares of the ceilings, means over the shapes."""
    yield "Kernels alone, as shares of the measured read bandwidth or arithmetic rate, whichever limits more"
    yield "(`python -m benchmarks.speed.linear`, `python -m benchmarks.speed.attention`):"
    yield ""
    shares = {m: _linear_shares(m) | read(m, "attention").get("share of the ceiling", {}) for m in machines()}
    having = [machine for machine in machines() if shares[machine]]
    yield f"| kernel | {' | '.join(having)} |"
    yield f"|---|{'---|' * len(having)}"
    for kernel in dict.fromkeys(name for of_machine in shares.values() for name in of_machine):
        yield f"| {kernel} | {' | '.join(number(shares[m].get(kernel)) for m in having)} |"


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
    yield f"| | {' | '.join(having)} | at most |"
    yield f"|---|{'---|' * (len(having) + 1)}"
    results = {machine: read(machine, name) for machine in having}
    for row in dict.fromkeys(row for rows in results.values() for row in rows):
        entries = [results[machine].get(row, {}) for machine in having]
        bar = next((entry["bar"] for entry in entries if entry.get("bar") is not None), None)
        yield f"| {row} | {' | '.join(number(entry.get('value')) for entry in entries)} | {number(bar)} |"


if __name__ == "__main__":
    print(page())
