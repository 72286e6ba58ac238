"""Turns what the server sees of requests and steps into metrics."""

from penstock.engine.assembler import CompletionDelta
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.metrics import Metrics
from penstock.request import FinishReason, Request, SequenceOutput

_COUNTERS = (
    "prefix_queried_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "steps",
    "scheduled_tokens",
    "drafted_tokens",
    "accepted_tokens",
)


class Meter:
    """Keeps what it takes to compute differences: one engine's last counts, and when each answer last grew."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counted = dict.fromkeys(_COUNTERS, 0)
        self._last_output: dict[str, dict[int, float]] = {}
        for reason in FinishReason:
            metrics.success.add(0, reason.value)

    def begin(self, info: EngineInfo) -> None:
        """A fresh engine counts from nought."""
        self._counted = dict.fromkeys(_COUNTERS, 0)
        self.stepped(EngineStats(0, 0, 0, 0, info.num_blocks, 0, 0, 0, 0, 0))

    def stepped(self, stats: EngineStats) -> None:
        """The engine's counts after a step."""
        metrics = self._metrics
        metrics.running.set(stats.num_running)
        metrics.waiting.set(stats.num_waiting)
        blocks = stats.blocks_held + stats.blocks_cached + stats.blocks_free
        metrics.kv_usage.set(stats.blocks_held / blocks if blocks else 0.0)
        metrics.kv_blocks.set(stats.blocks_held, "held")
        metrics.kv_blocks.set(stats.blocks_cached, "cached")
        metrics.kv_blocks.set(stats.blocks_free, "free")
        for name, counter in zip(
            _COUNTERS,
            (
                metrics.prefix_queries,
                metrics.prefix_hits,
                metrics.preemptions,
                metrics.steps,
                metrics.step_tokens,
                metrics.drafted_tokens,
                metrics.accepted_tokens,
            ),
            strict=True,
        ):
            count = getattr(stats, name)
            counter.add(count - self._counted[name])
            self._counted[name] = count

    def timed(self, step: StepRecord) -> None:
        """How long the parts of a step took."""
        self._metrics.step_schedule.observe(step.schedule)
        self._metrics.step_execute.observe(step.execute)
        self._metrics.step_update.observe(step.update)

    def accepted(self, request: Request) -> None:
        """A request went to the engine."""
        self._metrics.prompt_tokens.add(len(request.prompt_token_ids))
        self._last_output[request.request_id] = {}

    def output(self, request: Request, output: SequenceOutput, delta: CompletionDelta | None, now: float) -> None:
        """One answer of a request grew or, by the delta, ended."""
        metrics, last = self._metrics, self._last_output[request.request_id]
        if output.first_scheduled is not None and not last:
            metrics.queue_time.observe(output.first_scheduled - request.arrival)
        if output.token_ids:
            metrics.generation_tokens.add(len(output.token_ids))
            if not last:
                metrics.time_to_first_token.observe(now - request.arrival)
            elif output.index in last:
                metrics.inter_token_latency.observe(now - last[output.index])
            last[output.index] = now
        if delta is not None and delta.finish_reason is not None:
            metrics.success.add(1, delta.finish_reason.value)

    def finished(self, request: Request, now: float) -> None:
        """All answers of a request ended."""
        self._metrics.e2e_latency.observe(now - request.arrival)
        del self._last_output[request.request_id]
