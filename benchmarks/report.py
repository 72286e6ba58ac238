"""Prints a benchmark's rows beside their bars, and keeps them."""

import json
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def report(name: str, rows: Mapping[str, tuple[float, float | None]], *, keep: bool = True) -> int:
    """Print (value, bar) of each row; `keep` writes `results/<name>.json`. The exit code: 1 if a bar is missed.

    A row whose bar is None is there to be read.
    """
    for row, (value, bar) in rows.items():
        beside = "" if bar is None else f"   bar {bar:6.2f}   {'met' if value <= bar else 'MISSED'}"
        print(f"{row:<75} {value:8.2f}{beside}")
    if keep:
        RESULTS.mkdir(exist_ok=True)
        kept = {row: {"value": value, "bar": bar} for row, (value, bar) in rows.items()}
        (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return int(any(bar is not None and value > bar for value, bar in rows.values()))
