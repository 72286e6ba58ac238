"""Runs many simulations of one workload, and finds the cheapest fleet that meets the objectives."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product

from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.simulator.simulation import TOO_LONG, Fleet, Simulation
from penstock.simulator.summary import Summary, summarise
from penstock.simulator.workload import Workload

_OBJECTIVE = re.compile(r"\s*(mean|p50|p90|p99)\s+(ttft|itl|e2e)\s*<=\s*([0-9.]+)\s*(ms|s)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Objective:
    """An upper bound on a latency."""

    share: str
    what: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """
        Raises:
            ConfigError: it is not of the form `p90 ttft <= 1s`.
        """
        found = _OBJECTIVE.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"the objective {text!r} is not understood; write a bound as 'p90 ttft <= 1s' or 'mean itl <= 50ms': "
                "mean, p50, p90 or p99 of ttft, itl or e2e"
            )
        share, what, number, unit = found.groups()
        try:
            seconds = float(number) / (1000 if unit.lower() == "ms" else 1)
        except ValueError:
            raise ConfigError(f"the objective {text!r} has no valid number of seconds: {number}") from None
        return cls(share.lower(), what.lower(), seconds)

    def is_met(self, summary: Summary) -> bool:
        value: float = getattr(getattr(summary, self.what), self.share)
        return value <= self.seconds  # NaN is not

    def __str__(self) -> str:
        return f"{self.share} {self.what} <= {self.seconds:g}s"


def variants(
    fleet: Fleet, engines: Sequence[int], routers: Sequence[str], budgets: Sequence[int], seqs: Sequence[int]
) -> list[Fleet]:
    """The fleet with each combination of these options; an empty list leaves the fleet's own.

    Raises:
        ConfigError: a value is out of its range.
    """
    settings = fleet.settings
    found = []
    for count, router, budget, most in product(
        engines or [fleet.num_engines],
        routers or [fleet.router],
        budgets or [settings.max_num_batched_tokens],
        seqs or [settings.max_num_seqs],
    ):
        if most < 1 or budget < most:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({most}), and both at least 1"
            )
        failures = tuple(failure for failure in fleet.failures if failure.replica < count)
        changed = replace(settings, max_num_batched_tokens=budget, max_num_seqs=most)
        found.append(replace(fleet, num_engines=count, router=router, settings=changed, failures=failures))
    return found


def run_all(
    fleets: Sequence[Fleet], workload: Workload, price: float | None = None, jobs: int = 1
) -> Iterator[Summary]:
    """The summary of each simulation, in order, computed by `jobs` processes."""
    if jobs == 1 or len(fleets) == 1:
        for fleet in fleets:
            yield _run(fleet, workload, price)
        return
    with ProcessPoolExecutor(min(jobs, len(fleets))) as pool:
        count = len(fleets)
        yield from pool.map(_run, fleets, [workload] * count, [price] * count)


def _run(fleet: Fleet, workload: Workload, price: float | None) -> Summary:
    return summarise(fleet, Simulation(fleet, workload).run(), price)


def cheapest(summaries: Sequence[Summary], objectives: Sequence[Objective]) -> Summary | None:
    """The smallest fleet that meets all objectives, and refuses only requests that are too long for any fleet.

    Ties go to the fleet with the shortest time to first token; None if no fleet meets them.
    """
    fit = [
        summary
        for summary in summaries
        if not summary.refused.keys() - {TOO_LONG} and all(objective.is_met(summary) for objective in objectives)
    ]
    return min(fit, key=lambda summary: (summary.engines, summary.ttft.p90), default=None)
