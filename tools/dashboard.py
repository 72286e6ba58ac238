"""Grafana's dashboard of a server: python -m tools.dashboard > docs/grafana-dashboard.json

Import it in Grafana (Dashboards, New, Import) and choose the Prometheus data source that scrapes `/metrics`.
"""

import json
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = '{job=~"$job",instance=~"$instance"}'
COLUMNS = 24
"""Of Grafana's grid."""


@dataclass(frozen=True)
class Panel:
    title: str
    description: str
    """What it shows and what to do about it, behind the panel's (i)."""
    unit: str
    series: dict[str, str]
    """Legend to PromQL expression."""
    kind: str = "timeseries"
    width: int = 8
    """Columns of the grid."""
    height: int = 8
    stacked: bool = False
    thresholds: tuple[tuple[float, str], ...] = ()
    """From which value a stat has which colour."""
    most: float | None = None
    """Upper end of the axis."""
    values: tuple[tuple[str, str], ...] = ()
    """Text shown in place of a number."""


def rate(name: str, by: str = "") -> str:
    """Growth a second of a counter."""
    total = f"rate({name}_total{WHERE}[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def quantile(name: str, share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{WHERE}[$__rate_interval])))"


def quantiles(name: str) -> dict[str, str]:
    """Median and tails of a histogram."""
    return {f"p{share * 100:g}": quantile(name, share) for share in (0.5, 0.95, 0.99)}


def mean(name: str) -> str:
    """Mean of a histogram's values."""
    return " / ".join(f"sum(rate({name}_{part}{WHERE}[$__rate_interval]))" for part in ("sum", "count"))


def gauge(name: str, by: str = "", how: str = "sum") -> str:
    return f"{how} by ({by}) ({name}{WHERE})" if by else f"{how}({name}{WHERE})"


def share(part: str, whole: str, by: str = "") -> str:
    """One counter's growth as a share of another's."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def of_processes(name: str, aggregate: str = "{}") -> dict[str, str]:
    """A process metric of the HTTP server and of all its engines together."""
    return {
        "HTTP server": f"sum({aggregate.format(f'process_{name}{WHERE}')})",
        "engines": f"sum({aggregate.format(f'penstock_engine_process_{name}{WHERE}')})",
    }


def stat(title: str, description: str, unit: str, expression: str, *thresholds: tuple[float, str]) -> Panel:
    return Panel(title, description, unit, {title: expression}, "stat", 4, 4, thresholds=thresholds)


OVERVIEW = [
    stat(
        "Servers up",
        "Servers that Prometheus reaches, of those selected above.",
        "none",
        gauge("up"),
        *((0, "red"), (1, "green")),
    ),
    stat(
        "Output tokens/s",
        "Tokens generated a second, over all requests.",
        "none",
        rate("penstock_generation_tokens"),
    ),
    stat(
        "First token, p99",
        "99 of 100 requests get their first token within this time. If it grows while sequences wait, add an engine.",
        "s",
        quantile("penstock_time_to_first_token_seconds", 0.99),
        *((0, "green"), (2, "orange"), (10, "red")),
    ),
    Panel(
        "KV cache usage",
        "Share of KV blocks that running sequences hold, mean over servers. Near 100 % sequences are preempted.",
        "percentunit",
        {"KV cache usage": gauge("penstock_kv_cache_usage_ratio", how="avg")},
        *("gauge", 4, 4),
        thresholds=((0, "green"), (0.8, "orange"), (0.95, "red")),
        most=1,
    ),
    stat(
        "Waiting sequences",
        "Requests accepted but not yet running. Above 0 for long: the server is at its capacity.",
        "none",
        gauge("penstock_num_requests_waiting"),
        *((0, "green"), (1, "orange")),
    ),
    stat(
        "Failed calls/s",
        "Calls that ended with an error a second, refused ones included. The panel of failures by reason says why.",
        "none",
        f"{rate('penstock_request_failures')} or vector(0)",
        *((0, "green"), (0.1, "orange"), (1, "red")),
    ),
]

LATENCY = [
    Panel(
        "Time to first token",
        "From a request's arrival to its first token: the queue, then the prompt.",
        "s",
        quantiles("penstock_time_to_first_token_seconds"),
    ),
    Panel(
        "Inter-token latency",
        "Time between two outputs of one answer: what a reader of a stream sees as its speed.",
        "s",
        quantiles("penstock_inter_token_latency_seconds"),
    ),
    Panel(
        "End-to-end latency",
        "From a request's arrival to the end of its last answer.",
        "s",
        quantiles("penstock_e2e_request_latency_seconds"),
    ),
    Panel(
        "Queue time",
        "From a request's arrival to its first step.",
        "s",
        quantiles("penstock_request_queue_time_seconds"),
    ),
    Panel(
        "Request phases (mean)",
        "Where a request's time goes: waiting, computing its prompt (prefill), generating (decode).",
        "s",
        {part: mean(f"penstock_request_{part}_time_seconds") for part in ("queue", "prefill", "decode")},
        stacked=True,
    ),
    Panel(
        "Step phases (mean)",
        "Where an engine's time goes in one step. All but execute (the forward pass) is overhead.",
        "s",
        {part: mean(f"penstock_step_{part}_seconds") for part in ("schedule", "execute", "update")},
        stacked=True,
    ),
]

LOAD = [
    Panel(
        "Sequences",
        "Running: in the batch. Waiting: for a slot or for KV blocks.",
        "none",
        {"running": gauge("penstock_num_requests_running"), "waiting": gauge("penstock_num_requests_waiting")},
    ),
    Panel(
        "Tokens per second",
        "Prompt tokens of accepted requests, cached ones included, and generated tokens.",
        "none",
        {"prompt": rate("penstock_prompt_tokens"), "generated": rate("penstock_generation_tokens")},
    ),
    Panel(
        "Tokens per step (mean)",
        "Tokens computed in one forward pass. The more, the better the hardware is used.",
        "none",
        {"tokens": mean("penstock_step_tokens")},
    ),
    Panel(
        "Prompt length",
        "Tokens of a prompt.",
        "none",
        quantiles("penstock_request_prompt_tokens"),
    ),
    Panel(
        "Answer length",
        "Tokens of all answers to a request.",
        "none",
        quantiles("penstock_request_generation_tokens"),
    ),
    Panel(
        "Answers by finish reason",
        "stop: complete. length: cut by max_tokens or the context. abort: the client left. error: the request failed.",
        "reqps",
        {"{{finished_reason}}": rate("penstock_request_success", "finished_reason")},
    ),
    Panel(
        "Failed calls by reason",
        "The error's code: overloaded and rate_limit_exceeded are limits, invalid_request is the caller's mistake, "
        "engine_unavailable and server_error are the server's.",
        "reqps",
        {"{{reason}}": rate("penstock_request_failures", "reason")},
    ),
    Panel(
        "Fields without effect",
        "Fields of requests that were accepted although they change nothing here, by name.",
        "reqps",
        {"{{field}}": rate("penstock_ignored_fields", "field")},
    ),
    Panel(
        "Speculation: accepted drafts",
        "Share of drafted tokens that the model confirmed; each saved a step. Empty without --speculation.",
        "percentunit",
        {
            "accepted": share("penstock_spec_decode_num_accepted_tokens", "penstock_spec_decode_num_draft_tokens"),
        },
        most=1,
    ),
]

CACHES = [
    Panel(
        "KV blocks",
        "held: by running sequences. cached: idle in the prefix cache, reused or evicted. free: never used yet.",
        "none",
        {"{{state}}": gauge("penstock_kv_blocks", "state")},
        stacked=True,
    ),
    Panel(
        "Prefix cache hit rate",
        "Share of prompt tokens found in the prefix cache, which need no computation.",
        "percentunit",
        {"hit rate": share("penstock_prefix_cache_hits", "penstock_prefix_cache_queries")},
        most=1,
    ),
    Panel(
        "Preemptions per second",
        "Sequences that lost their KV blocks and must be computed again. More than a few: raise --kv-cache-memory "
        "or lower --max-num-seqs.",
        "none",
        {"preemptions": rate("penstock_num_preemptions")},
    ),
    Panel(
        "Images encoded per second",
        "Images, or tiles of them, that went through the vision tower: once each, while their blocks or features are "
        "cached.",
        "none",
        {"images": rate("penstock_images_encoded")},
    ),
    Panel(
        "KV blocks on disk",
        "Blocks in the engines' files. Empty without --kv-disk.",
        "none",
        {"blocks": gauge("penstock_stored_blocks")},
    ),
    Panel(
        "KV block transfers per second",
        "Blocks written to and loaded from files (--kv-disk) or other engines (--prefill-engines). missed: damaged or "
        "gone, and recomputed.",
        "none",
        {"{{what}}": rate("penstock_block_transfers", "what")},
    ),
    Panel(
        "Stored responses",
        "Memory of responses kept for previous_response_id, at most --max-stored-response-bytes.",
        "bytes",
        {"memory": gauge("penstock_stored_response_bytes")},
        width=6,
    ),
    Panel(
        "Stored responses: number",
        "Responses kept for previous_response_id.",
        "none",
        {"responses": gauge("penstock_stored_responses")},
        width=6,
    ),
    Panel(
        "Adapters in memory",
        "LoRA adapters loaded, summed over engines.",
        "none",
        {"loaded": gauge("penstock_adapters_loaded")},
        width=6,
    ),
    Panel(
        "Requests by adapter",
        "Accepted requests that selected a LoRA adapter.",
        "reqps",
        {"{{adapter}}": rate("penstock_adapter_requests", "adapter")},
        width=6,
    ),
]

ENGINES = [
    Panel(
        "Engines up",
        "1 while the engine is up, 0 while it is being replaced.",
        "none",
        {"engine {{place}}": gauge("penstock_place_up", "place", "min")},
        most=1,
        values=(("0", "down"), ("1", "up")),
    ),
    Panel(
        "Engine restarts",
        "Engines that died or hung and were replaced, in the last five minutes. Requests continue where they were; "
        "the server's log has the reason.",
        "none",
        {
            "all": f"sum(increase(penstock_engine_restarts_total{WHERE}[5m]))",
            "engine {{place}}": f"sum by (place) (increase(penstock_place_restarts_total{WHERE}[5m]))",
        },
    ),
    Panel(
        "Steps per second by engine",
        "Forward passes. An engine without steps while others are busy may be stuck.",
        "none",
        {"engine {{place}}": rate("penstock_place_steps", "place")},
    ),
    Panel(
        "Running sequences by engine",
        "Uneven lines are usual: the router prefers the engine that has a prompt cached.",
        "none",
        {"engine {{place}}": gauge("penstock_place_requests_running", "place")},
    ),
    Panel(
        "Waiting sequences by engine",
        "Waiting in each engine, and in the server for any engine with room.",
        "none",
        {
            "engine {{place}}": gauge("penstock_place_requests_waiting", "place"),
            "any engine": gauge("penstock_fleet_requests_queued"),
        },
    ),
    Panel(
        "Requests moved between engines",
        "taken over: from an engine that died or was drained. prefill to decode: with --prefill-engines.",
        "reqps",
        {
            "taken over": rate("penstock_fleet_requests_moved"),
            "prefill to decode": rate("penstock_fleet_requests_handed_on"),
        },
    ),
    Panel(
        "KV cache usage by engine",
        "Share of each engine's KV blocks that running sequences hold.",
        "percentunit",
        {"engine {{place}}": gauge("penstock_place_kv_cache_usage_ratio", "place", "avg")},
        width=12,
        most=1,
    ),
    Panel(
        "Prefix cache hit rate by engine",
        "Share of prompt tokens found in each engine's prefix cache.",
        "percentunit",
        {"engine {{place}}": share("penstock_place_prefix_cache_hits", "penstock_place_prefix_cache_queries", "place")},
        width=12,
        most=1,
    ),
    Panel(
        "Loaded models",
        "1 while a model is loaded, 0 while it is unloaded; of a server with several models.",
        "none",
        {"model {{model}}": gauge("penstock_model_loaded", "model", "min")},
        most=1,
        values=(("0", "unloaded"), ("1", "loaded")),
        width=12,
    ),
    Panel(
        "Loads of models",
        "Times that a model was loaded, in the last five minutes. Models that are loaded again and again need more "
        "memory, or a longer keep_alive.",
        "none",
        {"model {{model}}": f"sum by (model) (increase(penstock_model_loads_total{WHERE}[5m]))"},
        width=12,
    ),
]

PROCESSES = [
    Panel(
        "CPU cores in use",
        "CPU seconds a second. Engines use up to --threads each while they compute.",
        "none",
        of_processes("cpu_seconds_total", "rate({}[$__rate_interval])"),
    ),
    Panel(
        "Resident memory",
        "Memory that several engines share, such as mapped weights, counts once for each.",
        "bytes",
        of_processes("resident_memory_bytes"),
    ),
    Panel(
        "Open files",
        "Connections, files and sockets. The limit is that of the server's process (ulimit -n).",
        "none",
        of_processes("open_fds") | {"limit of the server": gauge("process_max_fds", how="min")},
    ),
    Panel(
        "Journal failing",
        "1 while the journal (--journal) cannot be written and requests are refused: look at its disk.",
        "none",
        {"failing": gauge("penstock_journal_failing", how="max")},
        most=1,
        values=(("0", "no"), ("1", "failing")),
    ),
    Panel(
        "Journal write errors per second",
        "Failed attempts to write the journal; they are repeated.",
        "none",
        {"errors": rate("penstock_journal_write_errors")},
    ),
    Panel(
        "Damaged journal rows per second",
        "tokens: computed again. request, result, response: lost. Damage means a bad disk or file system.",
        "none",
        {"{{what}}": rate("penstock_journal_damaged", "what")},
    ),
]

ROWS = {
    "Overview": OVERVIEW,
    "Latency": LATENCY,
    "Load": LOAD,
    "Caches and adapters": CACHES,
    "Engines": ENGINES,
    "Processes and journal": PROCESSES,
}


def panel_json(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.thresholds:
        steps = [{"value": value or None, "color": colour} for value, colour in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.values:
        defaults["mappings"] = [{"type": "value", "options": {value: {"text": text} for value, text in panel.values}}]
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 30 if panel.stacked else 8, "showPoints": "never"}
        if panel.stacked:
            defaults["custom"]["stacking"] = {"mode": "normal", "group": "A"}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.series.items())
        ],
    }


def row_json(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def panels() -> list[dict[str, Any]]:
    """Rows and their panels, laid out from left to right and from top to bottom."""
    laid: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        laid.append(row_json(len(laid) + 1, title, y))
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            laid.append(panel_json(len(laid) + 1, panel, x, y))
            x, height = x + panel.width, panel.height
        y += height
    return laid


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice of several values of a label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it (its JSON model, schema version 39: Grafana 10.4 and later)."""
    info = "penstock_model_info"
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        variable("job", "Job", f"label_values({info}, job)"),
        variable("model", "Model", f'label_values({info}{{job=~"$job"}}, model)'),
        # "All" is the list of instances, not ".*": so that a choice of models chooses their servers
        variable("instance", "Server", f'label_values({info}{{job=~"$job",model=~"$model"}}, instance)')
        | {"allValue": None},
    ]
    return {
        "uid": "penstock",
        "title": "Penstock",
        "description": "A Penstock server: docs/monitoring.md explains the panels and has alert rules.",
        "tags": ["penstock"],
        "schemaVersion": 39,
        "version": 2,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": panels(),
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
