"""Benchmark results: one JSON file a machine and benchmark, the last run's.

results/<machine>/<benchmark>.json, where the machine is named after its processor: `zen5`, `ice-lake`, ...
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

_AMD = {0x19: "zen3-or-4", 0x1A: "zen5"}
_AMD_ZEN4_MODELS = (range(0x10, 0x20), range(0x60, 0x80), range(0xA0, 0xB0))
_INTEL = {0x6A: "ice-lake", 0x6C: "ice-lake", 0x8F: "sapphire-rapids", 0xCF: "emerald-rapids", 0xAD: "granite-rapids"}


def machine_name() -> str:
    """The processor's generation as a folder name; `<vendor>-<family>-<model>` for one that is not listed."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    facts = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (\S+)$", cpuinfo, re.M))
    vendor, family, model = facts["vendor_id"], int(facts["cpu family"]), int(facts["model"])
    if vendor == "AuthenticAMD" and family == 0x19 and any(model in models for models in _AMD_ZEN4_MODELS):
        return "zen4"
    if vendor == "GenuineIntel" and model == 0xA7 and "amx_tile" in cpuinfo:
        return "granite-rapids"  # a hypervisor's number: it is Rocket Lake's, which has no AMX
    known = _AMD.get(family) if vendor == "AuthenticAMD" else _INTEL.get(model) if family == 6 else None
    return known or f"{vendor.lower()}-{family}-{model}"


def results_file(name: str) -> Path:
    """Where this machine's results of a benchmark lie; the folder is made."""
    folder = RESULTS / machine_name()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.json"


def save(name: str, results: object) -> None:
    """Replace this machine's results of a benchmark."""
    results_file(name).write_text(json.dumps(results, indent=1) + "\n")


def report(
    name: str, rows: Mapping[str, tuple[float, float | None]], *, keep: bool = True, beside: bool = False
) -> int:
    """Print each row's (value, bar) and, with `keep`, save them. Returns the exit code: 1 if a bar is missed.

    A row without a bar (None) is for information.

    Args:
        beside: save them beside the saved rows of other names, for a benchmark whose parts run one by one.
    """
    for row, (value, bar) in rows.items():
        verdict = "" if bar is None else f"   bar {bar:6.2f}   {'met' if value <= bar else 'MISSED'}"
        print(f"{row:<75} {value:8.2f}{verdict}", flush=True)
    if keep:
        file = results_file(name)
        saved = json.loads(file.read_text()) if beside and file.exists() else {}
        save(name, saved | {row: {"value": value, "bar": bar} for row, (value, bar) in rows.items()})
    return int(any(bar is not None and value > bar for value, bar in rows.values()))
