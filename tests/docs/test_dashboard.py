"""The dashboard and the alert rules ask for metrics that exist, and the dashboard leaves none out."""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.frontend.metrics import Counter, Histogram, Metrics
from penstock.server.errors import _KINDS, _REASONS
from penstock.server.exposition import PenstockNames, expose, process_collectors
from tools.dashboard import COLUMNS, dashboard

FOLDER = Path(__file__).parents[2] / "docs"
UNSEEN = {
    "penstock_engine_steps",
    "penstock_scheduled_tokens",
    "penstock_request_inference_time_seconds",
    "penstock_request_time_per_output_token_seconds",
    "penstock_request_prefill_kv_computed_tokens",
    "penstock_request_max_num_generation_tokens",
    "penstock_request_params_n",
    "penstock_request_params_max_tokens",
}
"""Told by other panels already, or no more than what was asked for."""
BY_PROMETHEUS = {"up"}
UNITS = {"none", "s", "reqps", "percentunit", "bytes"}
RULES = yaml.safe_load((FOLDER / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="processes are read from /proc")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    queries = [item["query"]["query"] for item in dashboard()["templating"]["list"] if isinstance(item["query"], dict)]
    return [target["expr"] for panel in panels() for target in panel["targets"]] + queries


def selected(expression: str) -> set[str]:
    """The metrics that an expression selects, without the suffixes of a histogram's series."""
    names = set(re.findall(r"\b((?:penstock|process)_\w+|up(?=\{))", expression))
    return {name if name in exposed() else re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


@functools.cache
def exposed() -> set[str]:
    """The names of all families as Prometheus' text format has them: counters end in `_total`."""
    text = expose(PenstockNames(Metrics()), *process_collectors(lambda: [os.getpid()])).decode()
    return set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) | BY_PROMETHEUS


def test_the_file_in_docs_is_what_the_code_makes():
    assert json.loads((FOLDER / "grafana-dashboard.json").read_text()) == dashboard()


def test_each_panel_asks_for_series_that_the_server_exposes_and_each_metric_has_a_panel():
    assert set().union(*map(selected, expressions())) <= exposed()
    all_expressions = "\n".join(expressions())
    for metric in Metrics():
        suffix = "_total" if isinstance(metric, Counter) else "_" if isinstance(metric, Histogram) else ""
        assert (metric.name in UNSEEN) != bool(re.search(rf"\b{metric.name}{suffix}", all_expressions)), metric.name


def test_each_panel_says_what_it_shows_and_in_which_unit():
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]


def test_a_choice_of_job_and_server_applies_to_each_panel():
    for panel in panels():
        for target in panel["targets"]:
            selectors = re.findall(r"(\w+)(\{[^}]*\})", target["expr"])
            assert selectors, target["expr"]
            assert {where for _, where in selectors} == {'{job=~"$job",instance=~"$instance"}'}, target["expr"]


def test_panels_have_ids_of_their_own_do_not_overlap_and_rows_are_full():
    laid = dashboard()["panels"]
    assert len({panel["id"] for panel in laid}) == len(laid)
    cells = [
        (x, y)
        for panel in laid
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    height = max(y for _, y in cells) + 1
    assert set(cells) == {(x, y) for x in range(COLUMNS) for y in range(height)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_alert_asks_for_metrics_and_reasons_that_exist_and_explains_itself(rule: dict[str, Any]) -> None:
    assert set() < selected(rule["expr"]) <= exposed()
    reasons = {code for _, code in _KINDS.values()} | set(_REASONS.values()) | {"server_error"}
    for listed in re.findall(r'reason=~"([^"]*)"', rule["expr"]):
        assert set(listed.split("|")) <= reasons
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")


def test_the_alert_rules_assume_the_job_name_of_the_scrape_configuration():
    (block,) = re.findall(r"```yaml\n(.*?)```", (FOLDER / "monitoring.md").read_text(), re.DOTALL)
    config = yaml.safe_load(block)
    assert config["rule_files"] == ["prometheus-alerts.yml"]
    jobs = {job for rule in RULES for job in re.findall(r'job="([^"]*)"', rule["expr"])}
    assert jobs == {config["scrape_configs"][0]["job_name"]}
