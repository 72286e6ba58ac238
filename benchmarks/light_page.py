"""The part of `docs/performance.md` on installs, starts, memory and instruction sets."""

from collections.abc import Iterator
from typing import Any

from benchmarks.report import RESULTS
from benchmarks.speed.scenarios import Scenario
from benchmarks.tables import number, read, times

LIGHT = """\
## Install, start, memory, narrower processors

Each row with the command that measures it, on {machine} unless it names another machine. Where a bar has a comma, a
figure is for 1 stream, a prompt of 1,024 tokens and 8 streams, as a multiple of llama.cpp's."""

INSTALL_NOTE = """\
- **Install**: `pip install -c constraints.txt .` in a fresh clone, most of it to compile for this processor
  ([native-kernels.md](native-kernels.md#build-at-install-time)); a [wheel](native-kernels.md#wheels) compiles nothing.
  The download is that of the packages that stay. CMake, Ninja and scikit-build-core are needed during the install only,
  and CMake and Ninja are downloaded only where the system has none. Sizes may be those of an install on another of the
  machines: they differ by the native kernels alone, which take 1 to 3 MB."""

LIGHT_NOTES = """\
- **SmolLM2**: Q4_1, 135 M parameters, with cached weights.
- **AVX2**: llama.cpp is compiled for AVX2, BMI2, F16C and FMA alone. For AVX-VNNI it has that, too."""

SETS = """\
### Instruction sets

`python -m benchmarks.speed.instruction_sets`. CPU milliseconds of one thread for a linear map of [3072, 1024], lower is
better: what a processor that lacks the wider sets loses. `generic` runs on any processor
([native-kernels.md](native-kernels.md#instruction-sets)), `reference` is PyTorch, here with AVX-512."""

Row = tuple[str, str, str, str, str]
"""A row of the table of installs and starts: what, its command, the figure, its bar, llama.cpp's figure."""
TRIPLE = ("1x32:64", "1x1024:1", "8x64:64")
WIDE = ("avx512", "avx512_vnni", "avx512_bf16", "amx")
INTEGERS = ("q4_0", "q4_k", "q8_0", "int8", "int4")


def light_table(machine: str) -> Iterator[str]:
    """The bars of installs, starts, memory and narrower processors."""
    yield "| | command, `python -m benchmarks.` | Penstock | bar | llama.cpp |"
    yield "|---|---|---|---|---|"
    rows = [*_started(machine), *_installed(machine), *_memory(machine)]
    machines = [
        machine,
        *(folder.name for folder in sorted(RESULTS.iterdir()) if folder.is_dir() and folder.name != machine),
    ]
    for each in (_narrow, _of_sets):
        rows += [row for name in machines for row in each(name)]
    for row in rows:
        yield f"| {' | '.join(row)} |"


def install_rows(machine: str) -> dict[str, Any]:
    """A machine's results of an install, with another's where a row is missing."""
    others = (read(folder.name, "install") for folder in sorted(RESULTS.iterdir()) if folder.is_dir())
    rows = {row: value for other in others for row, value in other.items()}
    return rows | read(machine, "install")


def light_notes(machine: str) -> Iterator[str]:
    if install_rows(machine):
        yield INSTALL_NOTE
    yield LIGHT_NOTES


def _started(machine: str) -> Iterator[Row]:
    rows = read(machine, "startup")
    smollm2 = "SmolLM2-135M-Instruct.Q4_1"
    for name, words in (("demo model", "demo model"), (smollm2, "SmolLM2")):
        for row in ("whole process, s", "CPU seconds", "peak memory, MiB"):
            what = f"`penstock generate`, one token, {words}: {row}"
            yield _entry(what, "speed.startup", rows, f"penstock generate, {name}, {row}", f"llama.cpp, {name}, {row}")
    row = "penstock serve, from the command to the first token, s"
    yield _entry("`penstock serve` until the first token over HTTP, demo model, s", "speed.startup", rows, row)


def _installed(machine: str) -> Iterator[Row]:
    rows = install_rows(machine)
    for row in rows:
        yield _entry(row, "speed.install", rows, row)


def _entry(what: str, command: str, rows: dict[str, Any], row: str, peer: str = "") -> Row:
    value, theirs = rows.get(row, {}), rows.get(peer, {})
    bar = "" if value.get("bar") is None else f"≤ {number(value['bar'])}"
    return what, f"`{command}`", number(value.get("value")), bar, number(theirs.get("value"))


def _memory(machine: str) -> Iterator[Row]:
    rows = read(machine, "peers").get("qwen3-0.6b q4_k_m llamacpp", {}).get("peak_rss_mib", {})
    if rows:
        ours, theirs = rows["penstock"], rows["llamacpp"]
        what = "Qwen3-0.6B's shape, Q4_K_M, 12 streams: peak memory, MiB"
        figure = f"{number(ours)} ({times(ours, theirs)} times)".replace("*", "")
        yield what, "`speed.peers MODEL q4_k_m llamacpp`", figure, "≤ 1.15 times", number(theirs)


def _narrow(machine: str) -> Iterator[Row]:
    """Beside llama.cpp on the sets of laptops."""
    runs = read(machine, "peers")
    for weights in ("q4_0", "q8_0", "q4_k_m"):
        for isa in ("avx2", "avx_vnni"):
            of_run = runs.get(f"qwen3-0.6b {weights}/{isa} llamacpp", {})
            rates = {
                Scenario.parse(row): rates for row, rates in of_run.items() if row not in ("load_s", "peak_rss_mib")
            }
            wanted = [rates.get(Scenario.parse(scenario)) for scenario in TRIPLE]
            if all(wanted):
                ratios = [f"{each['penstock'] / each['llamacpp']:.2f}" for each in wanted if each]
                what = f"{weights.upper()} on {set_name(isa)}, {machine}: speed, times llama.cpp's"
                command = f"`speed.peers MODEL {weights} llamacpp --isa {isa} --libraries DIR`"
                yield what, command, ", ".join(ratios), "≥ 1.0, 1.5, 2.0", "1"


def set_name(isa: str) -> str:
    return isa.upper().replace("_", "-")


def _of_sets(machine: str) -> Iterator[Row]:
    rows = read(machine, "instruction_sets")
    command = "`speed.instruction_sets`"
    gains = {
        kind: row["avx2"] / min(row[name] for name in WIDE if name in row)
        for kind in INTEGERS
        if any(name in (row := rows.get(f"{kind} 1", {})) for name in WIDE)
    }
    if gains:
        what = f"one row of integers on AVX-512, {machine}: speed, times that on AVX2"
        yield what, command, f"{min(gains.values()):.2f} to {max(gains.values()):.2f}", "≥ 1.0", ""
    losses = [row["generic"] / row["avx2"] for row in rows.values() if "generic" in row]
    if losses:
        yield (
            f"`generic`, {machine}: time, times that of AVX2",
            command,
            f"{min(losses):.1f} to {max(losses):.1f}",
            "",
            "",
        )
    for name, ratios_ in read(machine, "compare_trees").items():
        figures = ", ".join(f"{ratio:.2f}" for ratio in ratios_.values())
        yield f"{name}, {machine}: speed, times the version's before", "`speed.compare_trees`", figures, "≥ 0.98", ""


def sets_table(machine: str) -> Iterator[str]:
    rows = read(machine, "instruction_sets")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    yield f"| weights | tokens | {' | '.join(f'`{name}`' for name in names)} |"
    yield f"|---|--:|{'--:|' * len(names)}"
    for row, taken in rows.items():
        kind, tokens = row.split()
        cells = (f"{taken[name]:.2g}" if name in taken else "" for name in names)
        yield f"| {kind} | {tokens} | {' | '.join(cells)} |"
