"""Counters, gauges and histograms as plain data, which the server formats.

Names follow vLLM's, with `penstock_` in place of `vllm:`. `python -m penstock.frontend.metrics` prints docs/metrics.md.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import field, fields
from functools import partial
from itertools import accumulate
from typing import Any

from penstock.dataclass import dataclass

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds: from a step of a small model to a long answer of a large one."""

STEP_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds: from the Python code around a step to the computation of a long prompt."""

TOKEN_BUCKETS = (*(float(mantissa * 10**exponent) for exponent in range(6) for mantissa in (1, 2, 5)), 1e6)
"""Tokens of a prompt or an answer: vLLM's bounds, which end at the model's context there."""

STEP_TOKEN_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

# vLLM's bounds (vllm/v1/metrics/buckets.py of 0.32), so that quantiles over servers of both kinds are right.
VLLM_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
VLLM_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(slots=True)
class Gauge:
    """A current value, one per value of `label` if there is a label."""

    name: str
    help: str
    label: str | None = None
    vllm: tuple[str, ...] = ()
    """vLLM's names for it, without the prefix `vllm:`: the current one, then those of older versions."""
    values: dict[str, float] = field(default_factory=dict)

    def set(self, value: float, label_value: str = "") -> None:
        self.values[label_value] = value

    def forget(self, label_value: str) -> None:
        """Drop a value of the label whose engine, adapter or the like is gone."""
        self.values.pop(label_value, None)


@dataclass(slots=True)
class Counter:
    """A total that only grows, one per value of `label` if there is a label."""

    name: str
    help: str
    label: str | None = None
    vllm: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)

    def add(self, amount: float, label_value: str = "") -> None:
        self.values[label_value] = self.values.get(label_value, 0) + amount


@dataclass(slots=True)
class Histogram:
    """Counts of values at or below each of `bounds`, and of `vllm_bounds`, which are used under vLLM's names."""

    name: str
    help: str
    bounds: tuple[float, ...] = LATENCY_BUCKETS
    vllm: tuple[str, ...] = ()
    vllm_bounds: tuple[float, ...] | None = None
    """None for the same bounds."""
    total: float = 0.0
    _edges: list[float] = field(default_factory=list)
    """All bounds of both kinds, sorted."""
    _counts: list[int] = field(default_factory=list)
    """Values above the previous edge and at or below this one; the last: above all edges."""

    def __post_init__(self) -> None:
        self._edges = sorted({*self.bounds, *(self.vllm_bounds or ())})
        self._counts = [0] * (len(self._edges) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self.total += value

    def counts_up_to(self, bounds: Sequence[float]) -> list[int]:
        """Counts of values at or below each of these bounds, which must be edges; last, the count of all values."""
        up_to = list(accumulate(self._counts))
        return [up_to[bisect_left(self._edges, bound)] for bound in bounds] + up_to[-1:]


Metric = Gauge | Counter | Histogram


def _gauge(name: str, help: str, *vllm: str, label: str | None = None) -> Any:
    return field(default_factory=partial(Gauge, name, help, label, vllm))


def _counter(name: str, help: str, *vllm: str, label: str | None = None) -> Any:
    return field(default_factory=partial(Counter, name, help, label, vllm))


def _histogram(
    name: str,
    help: str,
    *vllm: str,
    bounds: tuple[float, ...] = LATENCY_BUCKETS,
    vllm_bounds: tuple[float, ...] | None = None,
) -> Any:
    return field(default_factory=partial(Histogram, name, help, bounds, vllm, vllm_bounds))


@dataclass(frozen=True, slots=True)
class Metrics:
    """All metrics of a server: each one's name, help, and vLLM's names for it."""

    model_info: Gauge = _gauge("penstock_model_info", "Always 1; the label is the served model's name.", label="model")
    model_loaded: Gauge = _gauge("penstock_model_loaded", "1 while the model is loaded, 0 while it is unloaded.")
    model_loads: Counter = _counter("penstock_model_loads", "Times that the model was loaded.")
    running: Gauge = _gauge("penstock_num_requests_running", "Running sequences.", "num_requests_running")
    waiting: Gauge = _gauge(
        "penstock_num_requests_waiting", "Requests waiting to be scheduled.", "num_requests_waiting"
    )
    kv_usage: Gauge = _gauge(
        "penstock_kv_cache_usage_ratio",
        "Share of KV blocks held by sequences, 0 to 1.",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
    )
    kv_blocks: Gauge = _gauge(
        "penstock_kv_blocks", "KV blocks: held by sequences, cached (idle in the prefix cache) or free.", label="state"
    )
    prefix_queries: Counter = _counter(
        "penstock_prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        "prefix_cache_queries",
        "gpu_prefix_cache_queries",
    )
    prefix_hits: Counter = _counter(
        "penstock_prefix_cache_hits",
        "Prompt tokens that were found in the prefix cache.",
        "prefix_cache_hits",
        "gpu_prefix_cache_hits",
    )
    stored_blocks: Gauge = _gauge("penstock_stored_blocks", "KV blocks in the engines' files (`--kv-disk`).")
    block_transfers: Counter = _counter(
        "penstock_block_transfers",
        "KV blocks transferred between memory and files, by what happened to them (values of `what`: see below).",
        label="what",
    )
    preemptions: Counter = _counter("penstock_num_preemptions", "Preempted sequences.", "num_preemptions")
    encoded_images: Counter = _counter(
        "penstock_images_encoded",
        "Images, and tiles, that the vision tower encoded; all others were found in a cache by their pixels.",
    )
    steps: Counter = _counter("penstock_engine_steps", "Forward passes.")
    step_schedule: Histogram = _histogram(
        "penstock_step_schedule_seconds", "Time to schedule a step.", bounds=STEP_BUCKETS
    )
    step_execute: Histogram = _histogram(
        "penstock_step_execute_seconds", "Time of a step's forward pass.", bounds=STEP_BUCKETS
    )
    step_update: Histogram = _histogram(
        "penstock_step_update_seconds", "Time to process the results of a step.", bounds=STEP_BUCKETS
    )
    restarts: Counter = _counter("penstock_engine_restarts", "Times that an engine died or hung, and was replaced.")
    replica_up: Gauge = _gauge("penstock_place_up", "1 while the engine is up, else 0.", label="place")
    replica_running: Gauge = _gauge(
        "penstock_place_requests_running", "Running sequences of the engine.", label="place"
    )
    replica_waiting: Gauge = _gauge(
        "penstock_place_requests_waiting", "Requests waiting to be scheduled in the engine.", label="place"
    )
    replica_kv_usage: Gauge = _gauge(
        "penstock_place_kv_cache_usage_ratio",
        "Share of the engine's KV blocks held by sequences, 0 to 1.",
        label="place",
    )
    replica_steps: Counter = _counter("penstock_place_steps", "Forward passes of the engine.", label="place")
    replica_prefix_queries: Counter = _counter(
        "penstock_place_prefix_cache_queries",
        "Prompt tokens that were looked up in the engine's prefix cache.",
        label="place",
    )
    replica_prefix_hits: Counter = _counter(
        "penstock_place_prefix_cache_hits", "Prompt tokens that were found in the engine's prefix cache.", label="place"
    )
    replica_restarts: Counter = _counter(
        "penstock_place_restarts", "Times that the engine died or hung, and was replaced.", label="place"
    )
    fleet_queued: Gauge = _gauge(
        "penstock_fleet_requests_queued", "Requests waiting for room in an engine; 0 with a single engine."
    )
    fleet_moved: Counter = _counter(
        "penstock_fleet_requests_moved", "Requests that moved to another engine because theirs died or was drained."
    )
    fleet_handed_on: Counter = _counter(
        "penstock_fleet_requests_handed_on",
        "Requests that moved from a prefill engine to a decode engine.",
    )
    journal_failing: Gauge = _gauge(
        "penstock_journal_failing", "1 while the journal cannot be written and requests are refused, else 0."
    )
    journal_write_errors: Counter = _counter("penstock_journal_write_errors", "Failed attempts to write the journal.")
    journal_damaged: Counter = _counter(
        "penstock_journal_damaged",
        "Requests with damaged journal rows, by the kind of row (values of `what`: see below).",
        label="what",
    )
    stored_responses: Gauge = _gauge("penstock_stored_responses", "Responses stored for `previous_response_id`.")
    stored_response_bytes: Gauge = _gauge(
        "penstock_stored_response_bytes", "Memory of stored responses, at most `--max-stored-response-bytes`."
    )
    step_tokens: Counter = _counter("penstock_scheduled_tokens", "Tokens computed in forward passes.")
    tokens_a_step: Histogram = _histogram(
        "penstock_step_tokens",
        "Tokens computed in one forward pass.",
        "iteration_tokens_total",
        bounds=STEP_TOKEN_BUCKETS,
    )
    drafted_tokens: Counter = _counter(
        "penstock_spec_decode_num_draft_tokens",
        "Drafted tokens that were verified.",
        "spec_decode_num_draft_tokens",
    )
    accepted_tokens: Counter = _counter(
        "penstock_spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted; each saved a step.",
        "spec_decode_num_accepted_tokens",
    )
    prompt_tokens: Counter = _counter("penstock_prompt_tokens", "Prompt tokens of accepted requests.", "prompt_tokens")
    generation_tokens: Counter = _counter("penstock_generation_tokens", "Tokens generated.", "generation_tokens")
    adapters_loaded: Gauge = _gauge("penstock_adapters_loaded", "Adapters in memory, summed over engines.")
    adapter_requests: Counter = _counter(
        "penstock_adapter_requests", "Accepted requests with an adapter, by its name.", label="adapter"
    )
    success: Counter = _counter(
        "penstock_request_success",
        "Finished answers (n per request), by reason.",
        "request_success",
        label="finished_reason",
    )
    failures: Counter = _counter("penstock_request_failures", "Failed calls, by reason.", label="reason")
    ignored_fields: Counter = _counter(
        "penstock_ignored_fields",
        "Fields of requests that were accepted without effect, by name; `unknown` counts fields that "
        "docs/dialects.md does not list.",
        label="field",
    )
    time_to_first_token: Histogram = _histogram(
        "penstock_time_to_first_token_seconds",
        "Time from arrival to the first token.",
        "time_to_first_token_seconds",
        vllm_bounds=VLLM_FIRST_TOKEN_BUCKETS,
    )
    inter_token_latency: Histogram = _histogram(
        "penstock_inter_token_latency_seconds",
        "Time between two outputs of an answer.",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        vllm_bounds=VLLM_INTER_TOKEN_BUCKETS,
    )
    time_per_output_token: Histogram = _histogram(
        "penstock_request_time_per_output_token_seconds",
        "Mean time per token after an answer's first.",
        "request_time_per_output_token_seconds",
        vllm_bounds=VLLM_INTER_TOKEN_BUCKETS,
    )
    e2e_latency: Histogram = _histogram(
        "penstock_e2e_request_latency_seconds",
        "Time from arrival to the end of the last answer.",
        "e2e_request_latency_seconds",
        vllm_bounds=VLLM_REQUEST_BUCKETS,
    )
    queue_time: Histogram = _histogram(
        "penstock_request_queue_time_seconds",
        "Time from arrival to the first step.",
        "request_queue_time_seconds",
        vllm_bounds=VLLM_REQUEST_BUCKETS,
    )
    prefill_time: Histogram = _histogram(
        "penstock_request_prefill_time_seconds",
        "Time from the first step to the first token.",
        "request_prefill_time_seconds",
        vllm_bounds=VLLM_REQUEST_BUCKETS,
    )
    decode_time: Histogram = _histogram(
        "penstock_request_decode_time_seconds",
        "Time from the first token to the last.",
        "request_decode_time_seconds",
        vllm_bounds=VLLM_REQUEST_BUCKETS,
    )
    inference_time: Histogram = _histogram(
        "penstock_request_inference_time_seconds",
        "Time from the first step to the last token.",
        "request_inference_time_seconds",
        vllm_bounds=VLLM_REQUEST_BUCKETS,
    )
    request_prompt_tokens: Histogram = _histogram(
        "penstock_request_prompt_tokens", "Tokens of a prompt.", "request_prompt_tokens", bounds=TOKEN_BUCKETS
    )
    request_computed_tokens: Histogram = _histogram(
        "penstock_request_prefill_kv_computed_tokens",
        "Tokens of a prompt that were not found in the prefix cache.",
        "request_prefill_kv_computed_tokens",
        bounds=TOKEN_BUCKETS,
    )
    request_generation_tokens: Histogram = _histogram(
        "penstock_request_generation_tokens", "Tokens of an answer.", "request_generation_tokens", bounds=TOKEN_BUCKETS
    )
    longest_answer: Histogram = _histogram(
        "penstock_request_max_num_generation_tokens",
        "Tokens of a request's longest answer.",
        "request_max_num_generation_tokens",
        bounds=TOKEN_BUCKETS,
    )
    params_n: Histogram = _histogram(
        "penstock_request_params_n", "Requested answers per request (n).", "request_params_n", bounds=N_BUCKETS
    )
    params_max_tokens: Histogram = _histogram(
        "penstock_request_params_max_tokens",
        "Requested maximum tokens of an answer.",
        "request_params_max_tokens",
        bounds=TOKEN_BUCKETS,
    )

    def __iter__(self) -> Iterator[Metric]:
        return (getattr(self, f.name) for f in fields(self))


INTRO = """\
# Metrics

`GET /metrics` responds in the Prometheus text format, in which the names of counters end in `_total`, and those of
histograms in `_bucket`, `_sum` and `_count`. This page is generated: `python -m penstock.frontend.metrics >
docs/metrics.md`.

With `--metrics-names vllm` the server also exports the names in the last column, with the prefix `vllm:`, for
dashboards and autoscalers made for vLLM. Types and bucket bounds are those of vLLM 0.32, and the labels are
`model_name` and `engine` (always `0`). Second names are those of older versions. `vllm:cache_config_info` has
`block_size` and `num_gpu_blocks`. `vllm:lora_requests_info` is exported if memory is planned for
[adapters](adapters.md): `running_lora_adapters` and `waiting_lora_adapters` are the adapters of open requests, joined
by commas, `max_lora` is the maximum number in memory, and the value is the time of the response. vLLM's metrics for
multi-modal inputs, KV connectors, sleep modes and reasons for waiting are not exported.

`process_*` describe the server process (CPU, memory, open files, start time), `penstock_engine_process_*` all engine
processes together (with the start time of the newest). Both are read from `/proc`, and absent on systems without it.

The label `place` is the number of a replica (an engine and its replacements): 0, or 0 to N - 1 with `--engines N`. An
engine that replaces a crashed one keeps the number. Metrics without this label are totals over all engines.

`penstock_block_transfers_total` counts KV blocks (`--kv-disk`, `--prefill-engines`) by `what` happened:

| `what` | blocks |
|---|---|
| `written` | written to an engine's file |
| `unwritten` | not written: the disk failed, or the block was evicted from memory first |
| `loaded` | loaded into memory, from the engine's own file or from another engine |
| `pulled` | the part of `loaded` that came from another engine |
| `pulled_nixl` | the part of `pulled` that came by NIXL |
| `missed` | not loaded (damaged, overwritten, unreadable, or of an engine that is gone) and therefore recomputed |
| `late` | sequences, not blocks: those that went on without waiting for a load |

`penstock_journal_damaged_total` counts damaged rows of the journal: `tokens` are computed again; a `request`, `result`
or `response` (stored for `previous_response_id`) is lost.

[monitoring.md](monitoring.md) has a scrape configuration, the Grafana dashboard and alert rules."""


def describe(metrics: Metrics) -> str:
    """The metrics as a page of documentation."""
    lines = [INTRO, "", "| name | kind | label | meaning | vLLM's names |", "|---|---|---|---|---|"]
    for metric in metrics:
        label = "" if isinstance(metric, Histogram) or metric.label is None else f"`{metric.label}`"
        vllm = ", ".join(f"`{name}`" for name in metric.vllm)
        lines.append(f"| `{metric.name}` | {type(metric).__name__.lower()} | {label} | {metric.help} | {vllm} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe(Metrics()))
