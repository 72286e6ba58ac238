"""What is told of simulations: quantiles, tables, objectives, sweeps and pictures."""

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from penstock.errors import ConfigError
from penstock.simulator.chats import Chats
from penstock.simulator.histogram import Histogram
from penstock.simulator.plots import plot
from penstock.simulator.simulation import TOO_LONG, Failure, Outcome, Simulation
from penstock.simulator.summary import Spread, Summary, quantile, spread_of, summarise, table
from penstock.simulator.sweep import Objective, cheapest, run_all, variants
from tests.simulator.fleets import make_fleet

CHATS = Chats(chats_per_second=1, seconds=15, answer_tokens=40)


def make_summary(engines: int, ttft: float, refused: dict[str, int] | None = None) -> Summary:
    spread = Spread(ttft, ttft, ttft, ttft)
    return Summary(
        engines, "prefix", 256, 16, 10, refused or {}, 60.0, spread, spread, spread, *[1.0] * 6, 100, 0, 0, None, None
    )


def test_quantiles_are_values_that_a_share_does_not_exceed() -> None:
    values = [float(value) for value in range(1, 11)]
    assert [quantile(values, share) for share in (0.0, 0.1, 0.5, 0.9, 0.91, 1.0)] == [1, 1, 5, 9, 10, 10]
    assert math.isnan(quantile([], 0.5))
    assert spread_of([3.0, 1.0, 2.0]) == Spread(2.0, 2.0, 3.0, 3.0)


def test_a_histograms_quantiles_are_nearly_those_of_its_numbers() -> None:
    rng = Random(1)
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    for share in (0.01, 0.5, 0.9, 0.999):
        assert histogram.quantile(share) == pytest.approx(quantile(values, share), rel=1e-3)
    assert math.isnan(Histogram().mean)
    assert math.isnan(Histogram().quantile(0.5))


@pytest.mark.parametrize("growth", [0.0, 1e-6, 0.05])
def test_a_series_counts_as_its_numbers_do(growth: float) -> None:
    series, single = Histogram(), Histogram()
    series.add_series(0.02, growth, 70, 3)
    for step in range(70):
        single.add(0.02 + step * growth, 3)
    assert series.count == single.count
    assert series.mean == pytest.approx(single.mean)
    for share in (0.1, 0.5, 0.95):
        assert series.quantile(share) == pytest.approx(single.quantile(share), rel=2e-3)


def test_a_summary_adds_up() -> None:
    fleet = make_fleet(2)
    outcome = Simulation(fleet, CHATS).run()
    summary = summarise(fleet, outcome, price=3.6)
    assert summary.answered == len(outcome.ends)
    assert summary.answer_tokens_per_second == pytest.approx(outcome.answer_tokens / outcome.seconds)
    assert summary.cost == pytest.approx(2 * 3.6 * outcome.seconds / 3600)
    assert summary.cost_per_million == pytest.approx(1e6 * (summary.cost or 0) / outcome.answer_tokens)
    assert 0 < summary.busy < 1
    assert 0 < summary.hit_rate < 1
    assert summary.ttft.p50 <= summary.ttft.p90 <= summary.ttft.p99 <= max(outcome.first_tokens)
    assert summarise(fleet, outcome).cost is None


def test_without_an_answer_there_are_no_numbers_and_json_says_so() -> None:
    summary = summarise(make_fleet(), Outcome())
    assert summary.as_json()["ttft"]["p90"] is None
    json.dumps(summary.as_json(), allow_nan=False)
    assert "-" in table([summary])


def test_a_table_has_a_line_each_and_costs_where_there_is_a_price() -> None:
    fleet = make_fleet()
    outcome = Simulation(fleet, CHATS).run()
    heading, row = table([summarise(fleet, outcome)]).splitlines()
    assert len(heading.split()) - len(row.split()) == 12  # "ttft mean" and the like are two words
    assert "cost/Mtok" in table([summarise(fleet, outcome, 1.0)])


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_table_fits_the_terminal_and_leaves_nothing_out(width: int, count: int) -> None:
    fleet = make_fleet()
    one = summarise(fleet, Simulation(fleet, CHATS).run(), 1.0)
    summaries = [replace(one, engines=1000 + index) for index in range(count)]
    shown = table(summaries, width)
    assert max(map(len, shown.splitlines())) <= width
    for summary in summaries:
        assert shown.count(str(summary.engines)) == 1
    if width == 200:
        assert shown == table(summaries)
    else:
        assert len(shown.split("\n\n")[0].splitlines()) == 22, "a line for each number"
        assert "ttft p90" in shown
        assert "cost/Mtok" in shown


def test_objectives_are_read_as_they_are_written() -> None:
    assert Objective.parse("p90 ttft <= 1s") == Objective("p90", "ttft", 1.0)
    assert Objective.parse(" Mean ITL<=50 ms") == Objective("mean", "itl", 0.05)
    assert str(Objective.parse("p99 e2e <= 2.5s")) == "p99 e2e <= 2.5s"


@pytest.mark.parametrize("text", ["", "p90 ttft < 1s", "p95 ttft <= 1s", "p90 ttft <= 1", "p90 ttft <= 1.2.3s"])
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="objective"):
        Objective.parse(text)


def test_the_fewest_engines_that_meet_the_objectives_are_found() -> None:
    bound = [Objective.parse("p90 ttft <= 1s")]
    few, enough, many = make_summary(1, 3.0), make_summary(2, 0.9), make_summary(4, 0.1)
    refusing, too_long = make_summary(1, 0.5, {"the queue is full": 1}), make_summary(2, 0.8, {TOO_LONG: 5})
    assert cheapest([few, enough, many, refusing], bound) is enough
    assert cheapest([enough, too_long], bound) is too_long
    assert cheapest([few, refusing], bound) is None
    assert cheapest([make_summary(1, math.nan)], bound) is None


def test_a_sweep_runs_all_combinations_the_same_alone_and_in_processes() -> None:
    fleet = make_fleet(3, failures=(Failure(3.0, 2),))
    fleets = variants(fleet, [1, 3], ["prefix", "round-robin"], [64], [])
    assert [(fleet.num_engines, fleet.router, fleet.settings.max_num_batched_tokens) for fleet in fleets] == [
        (1, "prefix", 64),
        (1, "round-robin", 64),
        (3, "prefix", 64),
        (3, "round-robin", 64),
    ]
    assert [len(fleet.failures) for fleet in fleets] == [0, 0, 1, 1]
    alone = list(run_all(fleets, CHATS, price=1.0))
    assert alone == list(run_all(fleets, CHATS, price=1.0, jobs=2))
    assert alone[0] != alone[2]
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        variants(fleet, [], [], [8], [16])


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{ending}"
    plot([make_summary(1, 0.5), make_summary(2, 0.2)], [Objective.parse("p90 ttft <= 1s")], path)
    assert path.read_bytes().startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot([make_summary(1, 0.5)], [], tmp_path / "none" / "plot.svg")
