"""Updates the metrics from engines' counters, steps and requests' outputs.

What comes with each step or token is only kept; `settle` counts it when the metrics are read.
"""

from dataclasses import field

from penstock.api.request import FinishReason, Request, SequenceOutput
from penstock.core.block_writer import TierStats
from penstock.dataclass import dataclass
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.frontend.metrics import Counter, Metrics
from penstock.frontend.output_processor import CompletionDelta

MAX_STEPS_KEPT = 256
"""Steps after which their durations are counted without waiting for a reader."""
_TRANSFERS = ("written", "unwritten", "loaded", "pulled", "pulled_nixl", "missed", "late")


@dataclass(slots=True)
class AnswerProgress:
    """An answer's token count, and the times of its first and last token."""

    first: float
    last: float
    num_tokens: int


@dataclass(slots=True)
class Progress:
    """Progress of one request."""

    first_scheduled: float | None = None
    answers: dict[int, AnswerProgress] = field(default_factory=dict)
    """By index; none before its first token."""


@dataclass(slots=True)
class _EngineCounts:
    """A replica's engine: the counters that it reported last, and those that the metrics contain."""

    latest: EngineStats
    counted: EngineStats


class Meter:
    """The metrics of a server's engines and requests."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._engines: dict[int, _EngineCounts] = {}
        self._num_generated = 0
        self._steps: list[StepRecord] = []
        self._inter_token_latency = metrics.inter_token_latency
        for reason in FinishReason:
            metrics.success.add(0, reason.value)

    # ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_engine_info(self, info: EngineInfo, replica: int) -> None:
        """Note a new engine, whose counters start at zero."""
        if replica in self._engines:
            self._count_engine(replica)
        # A new engine counts from zero, and the metrics must never fall.
        start = EngineStats(0, 0, 0, 0, info.num_blocks, 0, 0, 0, 0, 0)
        self._engines[replica] = _EngineCounts(start, start)
        self._metrics.replica_up.set(1, str(replica))
        self._metrics.replica_restarts.add(0, str(replica))

    def engine_is_down(self, replica: int) -> None:
        """Record that an engine died and is being replaced."""
        self._metrics.restarts.add(1)
        self._metrics.replica_restarts.add(1, str(replica))
        self._metrics.replica_up.set(0, str(replica))

    def forget_replica(self, replica: int) -> None:
        """Remove a replica for good. What its engines counted stays in the totals."""
        metrics = self._metrics
        self._count_engine(replica)
        del self._engines[replica]
        for gauge in (metrics.replica_up, metrics.replica_running, metrics.replica_waiting, metrics.replica_kv_usage):
            gauge.forget(str(replica))

    def record_stats(self, stats: EngineStats, replica: int) -> None:
        """Keep the counters that a replica's engine reports after a step."""
        self._engines[replica].latest = stats

    def record_step(self, step: StepRecord) -> None:
        """Keep a step, to observe the durations of its parts."""
        self._steps.append(step)
        # Observing takes longer than keeping, and Prometheus asks every few seconds.
        if len(self._steps) >= MAX_STEPS_KEPT:
            self._count_steps()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, num_queued: int) -> None:
        """Bring the metrics up to date; `num_queued`: requests that wait for an engine with room."""
        for replica in self._engines:
            self._count_engine(replica)
        self._count_steps()
        self._set_totals(num_queued)
        self._metrics.generation_tokens.add(self._num_generated)
        self._num_generated = 0

    def _count_engine(self, replica: int) -> None:
        """Set the gauges of a replica, and count what its engine did since the last time."""
        metrics, label, engine = self._metrics, str(replica), self._engines[replica]
        stats, counted = engine.latest, engine.counted
        engine.counted = stats
        blocks = stats.blocks_held + stats.blocks_cached + stats.blocks_free
        metrics.replica_running.set(stats.num_running, label)
        metrics.replica_waiting.set(stats.num_waiting, label)
        metrics.replica_kv_usage.set(stats.blocks_held / blocks if blocks else 0.0, label)
        metrics.replica_steps.add(stats.steps - counted.steps, label)
        metrics.replica_prefix_queries.add(stats.prefix_queried_tokens - counted.prefix_queried_tokens, label)
        metrics.replica_prefix_hits.add(stats.prefix_hit_tokens - counted.prefix_hit_tokens, label)
        totals: dict[str, Counter] = {
            "prefix_queried_tokens": metrics.prefix_queries,
            "prefix_hit_tokens": metrics.prefix_hits,
            "preemptions": metrics.preemptions,
            "steps": metrics.steps,
            "scheduled_tokens": metrics.step_tokens,
            "drafted_tokens": metrics.drafted_tokens,
            "accepted_tokens": metrics.accepted_tokens,
            "encoded_images": metrics.encoded_images,
        }
        for name, counter in totals.items():
            counter.add(getattr(stats, name) - getattr(counted, name))
        if stats.tier is not None:
            before = counted.tier or TierStats()
            for name in _TRANSFERS:
                metrics.block_transfers.add(getattr(stats.tier, name) - getattr(before, name), name)

    def _count_steps(self) -> None:
        metrics, steps = self._metrics, self._steps
        for step in steps:
            metrics.step_schedule.observe(step.schedule)
            metrics.step_execute.observe(step.execute)
            metrics.step_update.observe(step.update)
            metrics.tokens_a_step.observe(step.trace.num_tokens)
        steps.clear()

    def _set_totals(self, num_queued: int) -> None:
        """Set the gauges that are totals over all engines."""
        metrics, all_stats = self._metrics, [engine.latest for engine in self._engines.values()]
        held = sum(stats.blocks_held for stats in all_stats)
        cached = sum(stats.blocks_cached for stats in all_stats)
        free = sum(stats.blocks_free for stats in all_stats)
        metrics.fleet_queued.set(num_queued)
        metrics.running.set(sum(stats.num_running for stats in all_stats))
        metrics.waiting.set(sum(stats.num_waiting for stats in all_stats) + num_queued)
        metrics.kv_usage.set(held / (held + cached + free) if held + cached + free else 0.0)
        metrics.kv_blocks.set(held, "held")
        metrics.kv_blocks.set(cached, "cached")
        metrics.kv_blocks.set(free, "free")
        metrics.adapters_loaded.set(sum(stats.adapters_loaded for stats in all_stats))
        metrics.stored_blocks.set(sum(stats.tier.stored for stats in all_stats if stats.tier is not None))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def accepted(self, request: Request) -> None:
        """Record a new request."""
        metrics, num_tokens = self._metrics, len(request.prompt_token_ids)
        metrics.prompt_tokens.add(num_tokens)
        metrics.request_prompt_tokens.observe(num_tokens)
        metrics.params_n.observe(request.params.n)
        if request.adapter is not None:
            metrics.adapter_requests.add(1, request.adapter.name)
        metrics.params_max_tokens.observe(request.params.max_tokens)

    def output(
        self, request: Request, progress: Progress, output: SequenceOutput, delta: CompletionDelta | None, now: float
    ) -> None:
        """Record new tokens of one answer or, if the delta says so, its end."""
        if output.first_scheduled is not None and progress.first_scheduled is None:
            progress.first_scheduled = output.first_scheduled
            self._metrics.queue_time.observe(output.first_scheduled - request.arrival)
            self._metrics.request_computed_tokens.observe(len(request.prompt_token_ids) - output.num_cached_tokens)
        num_tokens = len(output.token_ids)
        if num_tokens:
            # Added to the counter when the metrics are read: this runs for each token.
            self._num_generated += num_tokens
            answer = progress.answers.get(output.index)
            if answer is not None:
                self._inter_token_latency.observe(now - answer.last)
                answer.last = now
                answer.num_tokens += num_tokens
            else:
                if not progress.answers:
                    self._metrics.time_to_first_token.observe(now - request.arrival)
                progress.answers[output.index] = AnswerProgress(now, now, num_tokens)
        if delta is not None and delta.finish_reason is not None:
            self._metrics.success.add(1, delta.finish_reason.value)

    def finished(self, request: Request, progress: Progress, now: float) -> None:
        """Record that all answers of a request ended."""
        metrics, answers = self._metrics, progress.answers.values()
        metrics.e2e_latency.observe(now - request.arrival)
        if not answers:
            return
        for answer in answers:
            metrics.request_generation_tokens.observe(answer.num_tokens)
            if answer.num_tokens > 1:
                metrics.time_per_output_token.observe((answer.last - answer.first) / (answer.num_tokens - 1))
        metrics.longest_answer.observe(max(answer.num_tokens for answer in answers))
        first, last = min(answer.first for answer in answers), max(answer.last for answer in answers)
        metrics.decode_time.observe(last - first)
        if progress.first_scheduled is not None:
            metrics.prefill_time.observe(first - progress.first_scheduled)
            metrics.inference_time.observe(last - progress.first_scheduled)
