"""The view of `penstock top`: samples in, something that rich prints out."""

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.top.sample import Sample, Samples, quantile, rate, share

BAR_CELLS = 20
MAX_REQUESTS = 15
"""Open requests that are shown, the oldest."""
SPARK_CELLS = 60
_SPARKS = " ▁▂▃▄▅▆▇█"
LATENCIES = {
    "first token": "penstock_time_to_first_token_seconds",
    "between tokens": "penstock_inter_token_latency_seconds",
    "whole request": "penstock_e2e_request_latency_seconds",
    "queue": "penstock_request_queue_time_seconds",
}


def view_of(samples: Samples, problem: str = "") -> RenderableType:
    """
    Args:
        problem: why the last sample is old; shown above it.
    """
    parts: list[RenderableType] = [_title(samples)]
    if problem:
        parts.append(Text(problem, style="bold red"))
    parts += ["", _load(samples), "", _latencies(samples), "", _engines(samples)]
    if samples.requests:
        parts += ["", _open_requests(samples.requests)]
    return Group(*parts)


def _title(samples: Samples) -> Text:
    model = ", ".join(samples.now.labels("penstock_model_info", "model"))
    began = samples.now.total("process_start_time_seconds")
    up = f", up {_duration(time.time() - began)}" if began else ""
    return Text.assemble((model, "bold"), f" at {samples.url}{up}")


def _load(samples: Samples) -> Table:
    now, before = samples.now, samples.previous
    steps = rate(before, now, "penstock_engine_steps_total")
    scheduled = rate(before, now, "penstock_scheduled_tokens_total")
    table = Table.grid(padding=(0, 2))
    generated = samples.rates("penstock_generation_tokens_total")
    table.add_row("tokens/s", f"{generated[-1] if generated else 0.0:.1f}", Text(_sparkline(generated), style="green"))
    table.add_row(
        "", "", f"prompts {rate(before, now, 'penstock_prompt_tokens_total'):.1f} tokens/s, {_step(steps, scheduled)}"
    )
    table.add_row("requests", f"{now.total('penstock_num_requests_running'):.0f}", _requests(samples))
    held, blocks = now.labelled("penstock_kv_blocks", "state", "held") or 0.0, now.total("penstock_kv_blocks")
    usage = held / blocks if blocks else 0.0
    table.add_row("KV cache", f"{usage:.0%}", _bar(usage) + _cached(samples))
    return table


def _step(steps: float, scheduled: float) -> str:
    return f"{steps:.1f} steps/s" + (f" of {scheduled / steps:.1f} tokens" if steps else "")


def _requests(samples: Samples) -> str:
    now, before = samples.now, samples.previous
    waiting, queued = now.total("penstock_num_requests_waiting"), now.total("penstock_fleet_requests_queued")
    finished = rate(before, now, "penstock_request_success_total")
    failed, preempted = now.total("penstock_request_failures_total"), now.total("penstock_num_preemptions_total")
    return (
        f"running, {waiting:.0f} waiting, {queued:.0f} queued before the engines; {finished:.1f} answers/s; "
        f"since the start {failed:.0f} failed, {preempted:.0f} preempted"
    )


def _cached(samples: Samples) -> str:
    ends = samples.oldest, samples.now
    hits = share(*ends, "penstock_prefix_cache_hits_total", "penstock_prefix_cache_queries_total")
    drafts = share(
        *ends, "penstock_spec_decode_num_accepted_tokens_total", "penstock_spec_decode_num_draft_tokens_total"
    )
    shown = "" if hits is None else f"  prefix cache hits {hits:.0%}"
    return shown + ("" if drafts is None else f"  drafts accepted {drafts:.0%}")


def _latencies(samples: Samples) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("last minute", "p50", "p90", "p99"):
        table.add_column(name, justify="left" if name == "last minute" else "right")
    for name, metric in LATENCIES.items():
        table.add_row(name, *(_seconds(quantile(samples.oldest, samples.now, metric, q)) for q in (0.5, 0.9, 0.99)))
    return table


def _engines(samples: Samples) -> Table:
    now, before = samples.now, samples.previous
    listed = {str(engine.get("place")): engine for engine in samples.engines or ()}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("engine", "state", "running", "waiting", "KV", "steps/s", "restarts", "process", "model"):
        table.add_column(name, justify="left" if name in ("state", "model") else "right")
    for place in sorted(now.labels("penstock_place_up", "place"), key=lambda number: (len(number), number)):
        table.add_row(*_engine_row(now, before, place, listed.get(place, {})))
    return table


def _engine_row(now: Sample, before: Sample, place: str, engine: dict[str, Any]) -> list[RenderableType]:
    """
    Args:
        engine: its entry in the server's list; empty if the server does not give it.
    """

    def value(metric: str, sample: Sample = now) -> float:
        return sample.labelled(f"penstock_place_{metric}", "place", place) or 0.0

    seconds, is_up = now.time - before.time, value("up") == 1
    steps = value("steps_total") - value("steps_total", before)
    return [
        place,
        Text(str(engine.get("state", "up" if is_up else "down")), style="green" if is_up else "bold red"),
        f"{value('requests_running'):.0f}",
        f"{value('requests_waiting'):.0f}",
        f"{value('kv_cache_usage_ratio'):.0%}",
        f"{max(0.0, steps) / seconds:.1f}" if seconds > 0 else "",
        f"{value('restarts_total'):.0f}",
        str(engine.get("pid", "")),
        Text(_short(str(engine.get("model", "")))),
    ]


def _open_requests(requests: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("request", "state", "prompt", "tokens", "tokens/s", "age", "engine", "key"):
        table.add_column(name, justify="left" if name in ("request", "state", "key") else "right")
    for request in requests[:MAX_REQUESTS]:
        table.add_row(*_request_row(request))
    if len(requests) > MAX_REQUESTS:
        table.add_row(f"and {len(requests) - MAX_REQUESTS} more")
    return table


def _request_row(request: dict[str, Any]) -> list[RenderableType]:
    first, replicas, age = request["first_token"], request["replicas"], request["age"]
    state = "answers" if first is not None else "prompt" if replicas else "queued"
    seconds = 0.0 if first is None else age - (first - request["arrival"])
    return [
        Text(request["alias"] or request["request_id"]),
        Text(state, style="green" if first is not None else ""),
        str(request["prompt_tokens"]),
        str(request["num_generated"]),
        f"{request['num_generated'] / seconds:.1f}" if seconds > 0 else "",
        _seconds(age),
        str(replicas[-1][1]) if replicas else "",
        Text(request["tenant"]),
    ]


def _short(model: str) -> str:
    """A hub id whole; of a folder or file its name."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith(("/", "./", "../")) else model


def _sparkline(values: list[float]) -> str:
    shown = values[-SPARK_CELLS:]
    top = max(shown, default=0.0)
    return "".join(_SPARKS[round(value / top * (len(_SPARKS) - 1))] for value in shown) if top else ""


def _bar(ratio: float) -> str:
    filled = round(min(1.0, max(0.0, ratio)) * BAR_CELLS)
    return "█" * filled + "░" * (BAR_CELLS - filled)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} days"
