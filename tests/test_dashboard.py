"""The dashboard is the one in docs/, shows only what is exposed, and leaves no metric out."""

import json
import re
from pathlib import Path

from penstock.metrics import Counter, Histogram, Metrics
from penstock.server.exposition import PenstockNames, expose
from tools.dashboard import dashboard

FOLDER = Path(__file__).parent.parent / "docs"
UNSEEN = {
    "penstock_kv_cache_usage_ratio",
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


def test_the_file_in_docs_is_what_the_code_makes():
    assert json.loads((FOLDER / "grafana-dashboard.json").read_text()) == dashboard()


def test_each_panel_asks_for_series_that_the_server_exposes_and_each_metric_has_a_panel():
    exposed = set(re.findall(r"^# TYPE (\w+) ", expose(PenstockNames(Metrics())).decode(), re.MULTILINE))
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"penstock_\w+", expression)}
    kinds = {metric.name: metric for metric in Metrics()}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in exposed else name for name in asked}
    assert families <= exposed
    names = {name if name in kinds else re.sub(r"_total$", "", name) for name in families}
    assert names == set(kinds) - UNSEEN
    for name in names:
        suffix = "_total" if isinstance(kinds[name], Counter) else "_" if isinstance(kinds[name], Histogram) else ""
        assert any(name + suffix in expression for expression in expressions)


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
