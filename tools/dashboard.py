"""Grafana's dashboard of a server: python -m tools.dashboard > docs/grafana-dashboard.json

Import it in Grafana (Dashboards, New, Import) and choose the Prometheus data source that scrapes `/metrics`.
"""

import json
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
"""Of a panel, in Grafana's grid of 24 columns."""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    series: dict[str, str]
    """Legend to PromQL expression."""


def rate(name: str, by: str = "") -> str:
    """Growth a second of a counter."""
    total = f'rate({name}_total{{job=~"$job"}}[$__rate_interval])'
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def quantiles(name: str) -> dict[str, str]:
    """Median and tails of a histogram."""
    buckets = f'sum by (le) (rate({name}_bucket{{job=~"$job"}}[$__rate_interval]))'
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.95, 0.99)}


def mean(name: str) -> str:
    """Mean of a histogram's values."""
    sum_and_count = (f'sum(rate({name}_{part}{{job=~"$job"}}[$__rate_interval]))' for part in ("sum", "count"))
    return " / ".join(sum_and_count)


def gauge(name: str, by: str = "") -> str:
    value = f'{name}{{job=~"$job"}}'
    return f"sum by ({by}) ({value})" if by else f"sum({value})"


PANELS = [
    Panel("Time to first token", "s", quantiles("penstock_time_to_first_token_seconds")),
    Panel("Between tokens", "s", quantiles("penstock_inter_token_latency_seconds")),
    Panel("Whole request", "s", quantiles("penstock_e2e_request_latency_seconds")),
    Panel(
        "Sequences",
        "short",
        {"running": gauge("penstock_num_requests_running"), "waiting": gauge("penstock_num_requests_waiting")},
    ),
    Panel("Time in the queue", "s", quantiles("penstock_request_queue_time_seconds")),
    Panel(
        "Tokens",
        "short",
        {"prompt": rate("penstock_prompt_tokens"), "generated": rate("penstock_generation_tokens")},
    ),
    Panel("Tokens of a prompt", "short", quantiles("penstock_request_prompt_tokens")),
    Panel("Tokens of an answer", "short", quantiles("penstock_request_generation_tokens")),
    Panel(
        "A request's parts, mean",
        "s",
        {
            part: mean(f"penstock_request_{name}_time_seconds")
            for part, name in (("queue", "queue"), ("prefill", "prefill"), ("decode", "decode"))
        },
    ),
    Panel("Tokens a step, mean", "short", {"tokens": mean("penstock_step_tokens")}),
    Panel(
        "Answers by finish reason",
        "reqps",
        {"{{finished_reason}}": rate("penstock_request_success", "finished_reason")},
    ),
    Panel("Failed calls by reason", "reqps", {"{{reason}}": rate("penstock_request_failures", "reason")}),
    Panel(
        "Restarts and preemptions",
        "short",
        {"restarts": rate("penstock_engine_restarts"), "preemptions": rate("penstock_num_preemptions")},
    ),
    Panel("KV blocks", "short", {"{{state}}": 'sum by (state) (penstock_kv_blocks{job=~"$job"})'}),
    Panel(
        "Prefix cache: share of prompt tokens found",
        "percentunit",
        {"hits": f"{rate('penstock_prefix_cache_hits')} / {rate('penstock_prefix_cache_queries')}"},
    ),
    Panel(
        "Speculation",
        "short",
        {
            "guessed": rate("penstock_spec_decode_num_draft_tokens"),
            "right": rate("penstock_spec_decode_num_accepted_tokens"),
        },
    ),
    Panel(
        "A step's parts, mean",
        "s",
        {part: mean(f"penstock_step_{part}_seconds") for part in ("schedule", "execute", "update")},
    ),
    Panel(
        "Journal",
        "short",
        {
            "failing": gauge("penstock_journal_failing"),
            "write errors": rate("penstock_journal_write_errors"),
            "damaged: {{what}}": rate("penstock_journal_damaged", "what"),
        },
    ),
    Panel(
        "Engines",
        "short",
        {
            "up: {{place}}": gauge("penstock_place_up", "place"),
            "restarts: {{place}}": rate("penstock_place_restarts", "place"),
            "steps: {{place}}": rate("penstock_place_steps", "place"),
            "moved requests": rate("penstock_fleet_requests_moved"),
        },
    ),
    Panel(
        "Sequences by engine",
        "short",
        {
            "running: {{place}}": gauge("penstock_place_requests_running", "place"),
            "waiting: {{place}}": gauge("penstock_place_requests_waiting", "place"),
            "for any engine": gauge("penstock_fleet_requests_queued"),
        },
    ),
    Panel(
        "Caches by engine",
        "percentunit",
        {
            "found: {{place}}": f"{rate('penstock_place_prefix_cache_hits', 'place')} / "
            f"{rate('penstock_place_prefix_cache_queries', 'place')}",
            "held: {{place}}": gauge("penstock_place_kv_cache_usage_ratio", "place"),
        },
    ),
    Panel(
        "Adapters",
        "short",
        {
            "loaded": gauge("penstock_adapters_loaded"),
            "requests: {{adapter}}": rate("penstock_adapter_requests", "adapter"),
        },
    ),
    Panel(
        "KV blocks in files",
        "short",
        {
            "{{what}} a second": rate("penstock_block_transfers", "what"),
            "prompts handed on": rate("penstock_fleet_requests_handed_on"),
            "kept": gauge("penstock_stored_blocks"),
        },
    ),
    Panel(
        "Stored responses",
        "short",
        {
            "responses": gauge("penstock_stored_responses"),
            "bytes": gauge("penstock_stored_response_bytes"),
        },
    ),
    Panel("Ignored fields", "short", {"{{field}}": rate("penstock_ignored_fields", "field")}),
]


def panel_json(number: int, panel: Panel) -> dict[str, Any]:
    column, row = number % 3, number // 3
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.series.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it (its JSON model, schema version 39: Grafana 10.4 and later)."""
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "label": "Job",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(penstock_num_requests_running, job)", "refId": "job"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "uid": "penstock",
        "title": "Penstock",
        "tags": ["penstock"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": [panel_json(number, panel) for number, panel in enumerate(PANELS)],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
