"""Turns what the server sees of requests and steps into metrics."""

from dataclasses import dataclass, field

from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.frontend.output_processor import CompletionDelta
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


@dataclass(slots=True)
class _Growth:
    """An answer's tokens: when the first and the last came, and how many there are."""

    first: float
    last: float
    num_tokens: int


@dataclass(slots=True)
class _Progress:
    """What came of one request so far."""

    first_scheduled: float | None = None
    answers: dict[int, _Growth] = field(default_factory=dict)


class Meter:
    """Keeps what it takes to compute differences: one engine's last counts, and how far each request got."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counted = dict.fromkeys(_COUNTERS, 0)
        self._progress: dict[str, _Progress] = {}
        for reason in FinishReason:
            metrics.success.add(0, reason.value)

    def set_engine_info(self, info: EngineInfo) -> None:
        """A fresh engine counts from nought."""
        self._counted = dict.fromkeys(_COUNTERS, 0)
        self.record_stats(EngineStats(0, 0, 0, 0, info.num_blocks, 0, 0, 0, 0, 0))

    def record_stats(self, stats: EngineStats) -> None:
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

    def record_step(self, step: StepRecord) -> None:
        """How long the parts of a step took."""
        self._metrics.step_schedule.observe(step.schedule)
        self._metrics.step_execute.observe(step.execute)
        self._metrics.step_update.observe(step.update)
        self._metrics.tokens_a_step.observe(step.trace.num_tokens)

    def accepted(self, request: Request) -> None:
        """A request went to the engine."""
        metrics, num_tokens = self._metrics, len(request.prompt_token_ids)
        metrics.prompt_tokens.add(num_tokens)
        metrics.request_prompt_tokens.observe(num_tokens)
        metrics.params_n.observe(request.params.n)
        metrics.params_max_tokens.observe(request.params.max_tokens)
        self._progress[request.request_id] = _Progress()

    def output(self, request: Request, output: SequenceOutput, delta: CompletionDelta | None, now: float) -> None:
        """One answer of a request grew or, by the delta, ended."""
        metrics, progress = self._metrics, self._progress[request.request_id]
        if output.first_scheduled is not None and progress.first_scheduled is None:
            progress.first_scheduled = output.first_scheduled
            metrics.queue_time.observe(output.first_scheduled - request.arrival)
            metrics.request_computed_tokens.observe(len(request.prompt_token_ids) - output.num_cached_tokens)
        if output.token_ids:
            metrics.generation_tokens.add(len(output.token_ids))
            self._grew(request, progress, output, now)
        if delta is not None and delta.finish_reason is not None:
            metrics.success.add(1, delta.finish_reason.value)

    def _grew(self, request: Request, progress: _Progress, output: SequenceOutput, now: float) -> None:
        growth = progress.answers.get(output.index)
        if not progress.answers:
            self._metrics.time_to_first_token.observe(now - request.arrival)
        if growth is None:
            progress.answers[output.index] = _Growth(now, now, len(output.token_ids))
            return
        self._metrics.inter_token_latency.observe(now - growth.last)
        growth.last = now
        growth.num_tokens += len(output.token_ids)

    def finished(self, request: Request, now: float) -> None:
        """All answers of a request ended."""
        metrics, progress = self._metrics, self._progress.pop(request.request_id)
        metrics.e2e_latency.observe(now - request.arrival)
        answers = progress.answers.values()
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

    def dropped(self, request: Request) -> None:
        """A request was given up before its answers ended."""
        self._progress.pop(request.request_id, None)
