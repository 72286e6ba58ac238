"""Writes what the parts found as a Markdown page.

Rows that have `seconds` with `bytes` or `flops` get their rates, and their share of the roofline: the time in which the
memory and the matrix units could do the work, at the rates that the parts `bandwidth` and `rates` measured, divided by
the time that it took.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.gpu.parts import SECTIONS

Row = Mapping[str, Any]
RAW = ("bytes", "flops", "seconds")


def page(results: Mapping[str, Any]) -> str:
    """The page of a run."""
    parts = results["parts"]
    facts = {part["name"]: part["facts"] for part in parts}
    name = facts.get("machine", {}).get("name", results["device"])
    lines = [f"# What a GPU says: {name}", ""]
    lines += [f"{results['date']} UTC, `python tools/gpu_day.py`, {results['seconds']:.0f} s.", ""]
    if results["device"] == "cpu":
        lines += ["**Run without a GPU** (`--device cpu`): times and rates say nothing of one.", ""]
    lines += table([_overview(part) for part in parts])
    against = [line for part in parts for line in _against(part)]
    if against:
        lines += ["", "## What did not hold, or was not measured", "", *against]
    roofline = Roofline.of(facts)
    for section, title in SECTIONS.items():
        lines += ["", f"## {section}. {title}"]
        for part in (each for each in parts if each["section"] == section):
            lines += ["", f"### {part['title']}", "", f"`{part['name']}`: {_outcome(part)}"]
            lines += _facts(part["facts"], roofline)
            if part.get("output"):
                lines += ["", "```", part["output"].replace("```", "'''").rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _overview(part: Row) -> Row:
    return {"part": f"`{part['name']}`", "": part["title"], "outcome": _outcome(part), "s": part["seconds"]}


def _outcome(part: Row) -> str:
    if part.get("reason"):
        return f"{part['status']}: {part['reason']}"
    missed = sum("error" in row for rows in part["facts"].values() if isinstance(rows, list) for row in rows)
    return f"{part['status']}, but for {missed} rows" if missed else str(part["status"])


def _against(part: Row) -> Iterator[str]:
    """A line for each row that has an error, or something that is not so."""
    for key, value in part["facts"].items():
        if value is False:
            yield f"- `{part['name']}`: {key}: no"
        for row in value if isinstance(value, list) else []:
            which = ", ".join(
                f"{name} {cell(each)}" for name, each in row.items() if not isinstance(each, float | bool)
            )
            refuted = [name for name, each in row.items() if each is False]
            if refuted:
                yield f"- `{part['name']}`: not {' or '.join(refuted)}: {which}"
            elif "error" in row:
                yield f"- `{part['name']}`: {which}"


class Roofline:
    """What the machine reaches: bytes and operations a second; None: not measured."""

    def __init__(self, bandwidth: float | None, rate: float | None) -> None:
        self._bandwidth, self._rate = bandwidth, rate

    @classmethod
    def of(cls, facts: Mapping[str, Row]) -> "Roofline":
        reads = [
            row for row in facts.get("bandwidth", {}).get("memory", []) if row["moves"] == "reads" and "seconds" in row
        ]
        products = [row for row in facts.get("rates", {}).get("products", []) if row["type"] == "bf16"]
        return cls(
            max((row["bytes"] / row["seconds"] for row in reads), default=None),
            max((row["flops"] / row["seconds"] for row in products if "seconds" in row), default=None),
        )

    def rated(self, row: Row, *, share: bool) -> Row:
        """The row with rates in place of bytes and operations."""
        if not isinstance(row.get("seconds"), float) or not ("bytes" in row or "flops" in row):
            return row
        seconds, least = row["seconds"], 0.0
        rated = {key: value for key, value in row.items() if key not in RAW} | {"µs": seconds * 1e6}
        if "bytes" in row:
            rated["GB/s"] = row["bytes"] / seconds / 1e9
            least = max(least, row["bytes"] / self._bandwidth if self._bandwidth else 0.0)
        if "flops" in row:
            rated["TFLOP/s"] = row["flops"] / seconds / 1e12
            least = max(least, row["flops"] / self._rate if self._rate else 0.0)
        if share and least:
            rated["of roofline"] = f"{least / seconds:.0%}"
        return rated


def _facts(facts: Row, roofline: Roofline) -> list[str]:
    lines: list[str] = []
    single = {key: value for key, value in facts.items() if not isinstance(value, list)}
    if single:
        lines += ["", *table([{"": key, "value": value} for key, value in single.items()])]
    for key, rows in facts.items():
        if isinstance(rows, list) and rows:
            share = key not in ("memory", "products")  # which are the roofline
            lines += ["", f"{key}:", "", *table([roofline.rated(row, share=share) for row in rows])]
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """A table with a column for each key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
    return lines + [f"| {' | '.join(cell(row.get(key, '')) for key in keys)} |" for row in rows]


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
