"""Summary of an outcome: quantiles, rates and costs, as JSON and as a table."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.dataclass import dataclass
from penstock.simulator.simulation import Fleet, Outcome

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile for this share of sorted values; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread_of(values: Sequence[float]) -> Spread:
    """Compute the statistics of `values`."""
    mean = sum(values) / len(values) if values else math.nan
    return Spread(mean, *(quantile(values, share) for share in SHARES.values()))


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one simulation."""

    engines: int
    router: str
    max_num_batched_tokens: int
    max_num_seqs: int
    answered: int
    refused: dict[str, int]
    seconds: float
    """Simulated, from the first arrival to the last event."""
    ttft: Spread
    """Time to the first token."""
    itl: Spread
    """Inter-token latency."""
    e2e: Spread
    """Time to the last token."""
    requests_per_second: float
    prompt_tokens_per_second: float
    answer_tokens_per_second: float
    hit_rate: float
    """Share of prompt tokens found in the prefix cache."""
    busy: float
    """Fraction of the engines' time spent in steps."""
    tokens_a_step: float
    steps: int
    preemptions: int
    moved: int
    """Number of requests resumed on another engine after a death."""
    cost: float | None
    """Cost of all engines for this time, in the currency of the price."""
    cost_per_million: float | None
    """Answer tokens."""

    def as_json(self) -> dict[str, Any]:
        """NaN and infinity become None."""
        return {name: _finite(value) for name, value in asdict(self).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarise(fleet: Fleet, outcome: Outcome, price: float | None = None) -> Summary:
    """
    Args:
        price: of an engine for an hour.
    """
    seconds = max(outcome.seconds, 1e-9)
    latencies = outcome.latencies
    cost = None if price is None else price * fleet.num_engines * seconds / 3600
    steps = outcome.num_steps
    return Summary(
        engines=fleet.num_engines,
        router=fleet.router,
        max_num_batched_tokens=fleet.settings.max_num_batched_tokens,
        max_num_seqs=fleet.settings.max_num_seqs,
        answered=len(outcome.ends),
        refused=dict(outcome.refused),
        seconds=outcome.seconds,
        ttft=spread_of(outcome.first_tokens),
        itl=Spread(latencies.mean, *map(latencies.quantile, SHARES.values())),
        e2e=spread_of(outcome.ends),
        requests_per_second=len(outcome.ends) / seconds,
        prompt_tokens_per_second=outcome.prompt_tokens / seconds,
        answer_tokens_per_second=outcome.answer_tokens / seconds,
        hit_rate=outcome.cached_tokens / max(1, outcome.prompt_tokens),
        busy=sum(counts.seconds for counts in outcome.engines) / seconds / fleet.num_engines,
        tokens_a_step=sum(counts.tokens for counts in outcome.engines) / max(1, steps),
        steps=steps,
        preemptions=sum(counts.preemptions for counts in outcome.engines),
        moved=outcome.moved,
        cost=cost,
        cost_per_million=None if cost is None else 1e6 * cost / max(1, outcome.answer_tokens),
    )


_SHOWN = ("mean", *SHARES)
_HEADINGS = [
    *("engines", "router", "budget", "seqs"),
    *(f"{name} {share}" for name in ("ttft", "itl", "e2e") for share in _SHOWN),
    *("tok/s", "hit", "busy", "refused"),
]


def table(summaries: Sequence[Summary], width: int | None = None) -> str:
    """A row per simulation; a row per number if only that fits `width` columns.

    Many simulations on a narrow terminal are several such tables, one below the other.
    """
    has_cost = any(summary.cost is not None for summary in summaries)
    headings = [*_HEADINGS, *(("cost", "cost/Mtok") if has_cost else ())]
    rows = [headings, *map(_cells, summaries)]
    lines = _aligned(rows)
    if width is None or len(lines[0]) <= width or not summaries:
        return "\n".join(lines)
    taken = max(map(len, headings))
    widest = max(len(cell) for row in rows[1:] for cell in row)
    each = max(1, (width - taken) // (widest + 2))
    parts = (rows[1 + at : 1 + at + each] for at in range(0, len(summaries), each))
    return "\n\n".join("\n".join(_aligned(list(zip(headings, *part, strict=True)))) for part in parts)


def _cells(summary: Summary) -> list[str]:
    cells = [str(summary.engines), summary.router, str(summary.max_num_batched_tokens), str(summary.max_num_seqs)]
    for spread in (summary.ttft, summary.itl, summary.e2e):
        cells += [_shown(getattr(spread, share)) for share in _SHOWN]
    cells += [
        f"{summary.answer_tokens_per_second:,.0f}",
        f"{100 * summary.hit_rate:.0f}%",
        f"{100 * summary.busy:.0f}%",
    ]
    cells.append(str(sum(summary.refused.values())))
    if summary.cost is not None and summary.cost_per_million is not None:
        cells += [f"{summary.cost:,.2f}", f"{summary.cost_per_million:,.2f}"]
    return cells


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _shown(seconds: float) -> str:
    """A time with its unit and three significant digits."""
    if not math.isfinite(seconds):
        return "-"
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}{unit}"
