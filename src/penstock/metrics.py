"""Counters, gauges and histograms as plain data: counted here, written out by the server.

Names follow vLLM's, with `penstock_` in place of `vllm:`. `python -m penstock.metrics` prints docs/metrics.md.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds: from a step of a small model to a long answer of a large one."""

STEP_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds: from the Python around a step to a long prompt's computing."""


@dataclass(slots=True)
class Gauge:
    """A value of this moment, one for each value of `label` if there is one."""

    name: str
    help: str
    label: str | None = None
    values: dict[str, float] = field(default_factory=dict)

    def set(self, value: float, label_value: str = "") -> None:
        self.values[label_value] = value


@dataclass(slots=True)
class Counter:
    """A total that only grows, one for each value of `label` if there is one."""

    name: str
    help: str
    label: str | None = None
    values: dict[str, float] = field(default_factory=dict)

    def add(self, amount: float, label_value: str = "") -> None:
        self.values[label_value] = self.values.get(label_value, 0) + amount


@dataclass(slots=True)
class Histogram:
    """How often values fell at or below each of `bounds`; the last count is of those above all of them."""

    name: str
    help: str
    bounds: tuple[float, ...] = LATENCY_BUCKETS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


Metric = Gauge | Counter | Histogram


class Metrics:
    """Everything that is measured of one server."""

    def __init__(self) -> None:
        self.running = Gauge("penstock_num_requests_running", "Sequences that take part in steps.")
        self.waiting = Gauge("penstock_num_requests_waiting", "Requests that wait to be scheduled.")
        self.kv_usage = Gauge("penstock_kv_cache_usage_ratio", "Share of KV blocks held by sequences, 0 to 1.")
        self.kv_blocks = Gauge(
            "penstock_kv_blocks",
            "KV blocks: held by sequences, cached (idle in the prefix cache) or free.",
            label="state",
        )
        self.prefix_queries = Counter(
            "penstock_prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."
        )
        self.prefix_hits = Counter("penstock_prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
        self.preemptions = Counter("penstock_num_preemptions", "Sequences whose blocks were taken for another.")
        self.steps = Counter("penstock_engine_steps", "Forward passes.")
        self.step_schedule = Histogram("penstock_step_schedule_seconds", "Putting a step together.", STEP_BUCKETS)
        self.step_execute = Histogram("penstock_step_execute_seconds", "A step's forward pass.", STEP_BUCKETS)
        self.step_update = Histogram("penstock_step_update_seconds", "Taking in what a step sampled.", STEP_BUCKETS)
        self.restarts = Counter("penstock_engine_restarts", "Engines that died or hung, and were replaced.")
        self.step_tokens = Counter("penstock_scheduled_tokens", "Tokens computed in forward passes.")
        self.drafted_tokens = Counter(
            "penstock_spec_decode_num_draft_tokens", "Tokens guessed by speculation and computed."
        )
        self.accepted_tokens = Counter(
            "penstock_spec_decode_num_accepted_tokens", "Guessed tokens that were right: each saved a step."
        )
        self.prompt_tokens = Counter("penstock_prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = Counter("penstock_generation_tokens", "Tokens generated.")
        self.success = Counter(
            "penstock_request_success", "Answers (n to a request) that ended, by reason.", label="finished_reason"
        )
        self.failures = Counter("penstock_request_failures", "Calls that failed, by reason.", label="reason")
        self.time_to_first_token = Histogram(
            "penstock_time_to_first_token_seconds", "From the request's arrival to its first token."
        )
        self.inter_token_latency = Histogram(
            "penstock_inter_token_latency_seconds", "Between two outputs of one answer."
        )
        self.e2e_latency = Histogram(
            "penstock_e2e_request_latency_seconds", "From the request's arrival to the end of its last answer."
        )
        self.queue_time = Histogram(
            "penstock_request_queue_time_seconds", "From the request's arrival to the first step it took part in."
        )

    def __iter__(self) -> Iterator[Metric]:
        return iter(vars(self).values())


def describe(metrics: Metrics) -> str:
    """The metrics as a page of documentation."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` answers in the Prometheus text format. There, counters end in `_total`, histograms in",
        "`_bucket`, `_sum` and `_count`. This page is generated: `python -m penstock.metrics > docs/metrics.md`.",
        "",
        "| name | kind | label | meaning |",
        "|---|---|---|---|",
    ]
    for metric in metrics:
        label = "" if isinstance(metric, Histogram) or metric.label is None else f"`{metric.label}`"
        lines.append(f"| `{metric.name}` | {type(metric).__name__.lower()} | {label} | {metric.help} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe(Metrics()))
