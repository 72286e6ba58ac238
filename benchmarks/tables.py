"""What the page's parts share: results, and figures as cells of tables."""

import json
from typing import Any

from benchmarks.report import RESULTS


def read(machine: str, name: str) -> dict[str, Any]:
    file = RESULTS / machine / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def times(ours: float | None, theirs: float | None) -> str:
    """The ratio, in bold if it is good."""
    if not (ours and theirs):
        return ""
    return f"**{ours / theirs:.2f}**" if ours > theirs else f"{ours / theirs:.2f}"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
