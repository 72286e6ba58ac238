"""Request and step records: metrics (`Meter`), and a history of the last minutes (`History`).

`History` explains a request's latency. It computes nothing until it is asked: a step costs one append, a request a few.
Steps are stored encoded, many per chunk: this takes half the memory of objects, and does not scatter small objects
over the space that large bodies leave free.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.api.request import FinishReason, Request, SequenceOutput
from penstock.core.block_writer import TierStats
from penstock.engine.info import EngineInfo, EngineStats, StepRecord
from penstock.frontend.metrics import Metrics
from penstock.frontend.output_processor import CompletionDelta

MAX_STEPS = 20_000
MAX_REQUESTS = 2_000
MAX_SECONDS = 600.0
QUEUED_SECONDS = 0.001
"""A request handed over later than this has waited for an engine."""
STEPS_A_PIECE = 100
"""Steps that are encoded and dropped together."""


@dataclass(slots=True)
class RequestRecord:
    """One request's record on the server, without its prompt; times in seconds of `time.monotonic()`."""

    request_id: str
    alias: str | None
    tenant: str
    priority: int
    prompt_tokens: int
    n: int
    arrival: float
    first_token: float | None = None
    ended: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    """(time, replica) of each handover to an engine."""

    def replica_at(self, time: float) -> int | None:
        """The engine's replica at this time; None while the request waited for one."""
        return next((replica for since, replica in reversed(self.replicas) if since <= time), None)


@dataclass(slots=True)
class TimelineEvent:
    """An event of a request: what it did or why it waited, in one step or in consecutive similar steps."""

    what: str
    """waited, admitted, computed, generated or preempted."""
    at: float
    """Seconds since the request's arrival."""
    seconds: float
    steps: int
    tokens: int | None = None
    """Tokens computed; on admission, tokens found in the prefix cache."""
    why: str | None = None
    """Reason for waiting; if behind another request, that request and its reason."""
    place: int | None = None
    """Number of the engine's replica, as the API names it; None while the request had no engine."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive steps, encoded."""

    began: float
    ended: float
    encoded: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[StepRecord])


class History:
    """The newest steps and requests, up to a maximum number and age (ten minutes)."""

    def __init__(self, order: str, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            order: name of the queue policy, for reasons such as "behind another request".
        """
        self._order = order
        self._clock = clock
        self._pieces: deque[_Piece] = deque(maxlen=MAX_STEPS // STEPS_A_PIECE - 1)
        self._latest: list[StepRecord] = []
        self._records: dict[str, RequestRecord] = {}

    def accepted(self, request: Request, alias: str | None) -> None:
        """Record a new request; `alias` is another name of its call."""
        while len(self._records) >= MAX_REQUESTS:
            del self._records[next(iter(self._records))]
        self._records[request.request_id] = RequestRecord(
            request.request_id,
            alias,
            request.tenant,
            request.priority,
            len(request.prompt_token_ids),
            request.params.n,
            request.arrival,
        )

    def handed_over(self, request_id: str, replica: int, now: float) -> None:
        """Record that the request was sent to the engine of this replica."""
        record = self._records.get(request_id)
        if record is not None:
            record.replicas.append((now, replica))

    def record_step(self, step: StepRecord) -> None:
        self._latest.append(step)
        if len(self._latest) == STEPS_A_PIECE:
            first, ended = self._latest[0], step.began + step.seconds
            self._pieces.append(_Piece(first.began, ended, _ENCODER.encode(self._latest)))
            self._latest.clear()
        while self._pieces and self._pieces[0].ended < step.began - MAX_SECONDS:
            self._pieces.popleft()

    def progressed(self, request_id: str, now: float, finish_reason: str | None) -> None:
        """Record a request's token, or the end of one of its answers."""
        record = self._records.get(request_id)
        if record is None:
            return
        if record.first_token is None and finish_reason is None:
            record.first_token = now
        if finish_reason is not None:
            record.finish_reasons.append(finish_reason)
            if len(record.finish_reasons) == record.n:
                record.ended = now

    def find(self, name: str) -> list[RequestRecord]:
        """The requests of a call, by a request's id, the call's id or its alias."""
        return [
            record
            for request_id, record in self._records.items()
            if name in (request_id, record.alias) or request_id.rpartition("-")[0] == name
        ]

    def records(self) -> list[RequestRecord]:
        """All recorded requests, in order of arrival."""
        return list(self._records.values())

    def steps(self, seconds: float) -> list[StepRecord]:
        """Steps that began in the last `seconds`, oldest first."""
        since = self._clock() - seconds
        return [step for step in self._steps_between(since, math.inf) if step.began >= since]

    def _steps_between(self, begin: float, end: float) -> Iterator[StepRecord]:
        """Steps between two times, and a few around them."""
        pieces = [piece for piece in self._pieces if piece.ended >= begin and piece.began <= end]
        return itertools.chain(*(_DECODER.decode(piece.encoded) for piece in pieces), self._latest)

    def explain(self, record: RequestRecord) -> list[TimelineEvent]:
        """A request's events, step by step; consecutive similar steps are merged."""
        events: list[TimelineEvent] = []
        for event in self._events(record):
            last = events[-1] if events else None
            alike = last is not None and (last.what, last.why, last.place) == (event.what, event.why, event.place)
            if last and alike and event.what in ("waited", "generated"):
                last.steps += 1
                last.seconds = round(event.at + event.seconds - last.at, 6)
            else:
                events.append(event)
        return events

    def _events(self, record: RequestRecord) -> Iterator[TimelineEvent]:
        request_id, arrival = record.request_id, record.arrival
        running = False
        handed_over = (
            record.replicas[0][0] if record.replicas else self._clock() if record.ended is None else record.ended
        )
        if handed_over - arrival > QUEUED_SECONDS:
            yield TimelineEvent("waited", 0.0, round(handed_over - arrival, 6), 0, why="fleet: no engine has room")
        for step in self._steps_between(arrival, math.inf if record.ended is None else record.ended):
            if step.began + step.seconds < arrival or (record.ended is not None and step.began > record.ended):
                continue
            replica = record.replica_at(step.began + step.seconds)
            if step.replica != replica:
                continue
            trace = step.trace
            at, seconds = round(step.began - arrival, 6), round(step.seconds, 6)
            chunk = sum(count for name, count in trace.chunks if name == request_id)
            if request_id in trace.preempted:
                running = False
                yield TimelineEvent("preempted", at, seconds, 1, place=replica)
            for name, cached in trace.admitted:
                if name == request_id:
                    running = True
                    yield TimelineEvent("admitted", at, 0.0, 1, cached, place=replica)
            if chunk:
                running = True
                yield TimelineEvent("computed", at, seconds, 1, chunk, place=replica)
            elif running:
                yield TimelineEvent("generated", at, seconds, 1, place=replica)
            elif trace.blocked is not None and request_id not in trace.preempted and at + seconds > 0:
                yield TimelineEvent(
                    "waited", at, seconds, 1, why=self._reason(request_id, *trace.blocked), place=replica
                )

    def _reason(self, request_id: str, head: str, obstacle: str) -> str:
        return obstacle if head == request_id else f"{self._order}: behind {head}, which waits for {obstacle}"


def chrome_trace(steps: list[StepRecord], records: list[RequestRecord]) -> dict[str, Any]:
    """Steps and requests in the format of chrome://tracing and ui.perfetto.dev.

    Format: "Trace Event Format", Google, the JSON object form. Times are microseconds of `time.monotonic()`.
    """
    events: list[dict[str, Any]] = []
    for replica in sorted({step.replica for step in steps} | {0}):
        for row, name in enumerate((f"engine {replica}: steps", f"engine {replica}: schedule, execute, update")):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2 * replica + row, "args": {"name": name}}
            )
    for step in steps:
        events += _slices(step)
    since = steps[0].began if steps else 0.0
    for record in records:
        if record.ended is None or record.ended >= since:
            events += _spans(record)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slices(step: StepRecord) -> Iterator[dict[str, Any]]:
    trace, at = step.trace, step.began
    args = {
        "tokens": trace.num_tokens,
        "sequences": trace.num_sequences,
        "admitted": [name for name, _ in trace.admitted],
        "chunks": [f"{name}: {count}" for name, count in trace.chunks],
        "preempted": trace.preempted,
        "drafts": f"{trace.num_accepted} of {trace.num_drafted} accepted",
        "blocked": trace.blocked and f"{trace.blocked[0]}: {trace.blocked[1]}",
    }
    name = f"{trace.num_tokens} tokens of {trace.num_sequences}"
    row = 2 * step.replica
    yield {"ph": "X", "name": name, "pid": 1, "tid": row, "ts": at * 1e6, "dur": step.seconds * 1e6, "args": args}
    for part in ("schedule", "execute", "update"):
        seconds = getattr(step, part)
        yield {"ph": "X", "name": part, "pid": 1, "tid": row + 1, "ts": at * 1e6, "dur": seconds * 1e6}
        at += seconds


def _spans(record: RequestRecord) -> Iterator[dict[str, Any]]:
    shared = {"cat": "request", "id": record.request_id, "pid": 2, "tid": 0}
    moments = [
        ("until the first token", record.arrival, record.first_token),
        ("answer", record.first_token, record.ended),
    ]
    for name, begin, end in moments:
        if begin is not None and end is not None:
            yield {**shared, "ph": "b", "name": name, "ts": begin * 1e6, "args": {"tenant": record.tenant}}
            yield {**shared, "ph": "e", "name": name, "ts": end * 1e6}


_COUNTERS = (
    "prefix_queried_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "steps",
    "scheduled_tokens",
    "drafted_tokens",
    "accepted_tokens",
)


_TRANSFERS = ("written", "unwritten", "loaded", "pulled", "pulled_nixl", "missed", "late")


@dataclass(slots=True)
class _Growth:
    """An answer's token count, and the times of its first and last token."""

    first: float
    last: float
    num_tokens: int


@dataclass(slots=True)
class _Progress:
    """Progress of one request."""

    adapter: str | None = None
    """Name of the request's adapter."""
    first_scheduled: float | None = None
    answers: dict[int, _Growth] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Adapter names of open requests; one adapter may have both running and waiting requests."""

    running: list[str]
    waiting: list[str]


class Meter:
    """Updates metrics from engine counters and outputs: keeps the previous counters, and each request's progress."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stats: dict[int, EngineStats] = {}
        self._counted: dict[int, dict[str, int]] = {}
        self._transfers: dict[int, TierStats] = {}
        self._num_queued = 0
        self._progress: dict[str, _Progress] = {}
        for reason in FinishReason:
            metrics.success.add(0, reason.value)

    def set_engine_info(self, info: EngineInfo, replica: int) -> None:
        """Reset the previous counters to zero, as a new engine's counters start there."""
        self._counted[replica] = dict.fromkeys(_COUNTERS, 0)
        self._transfers[replica] = TierStats()
        self._metrics.replica_up.set(1, str(replica))
        self._metrics.replica_restarts.add(0, str(replica))
        self.record_stats(EngineStats(0, 0, 0, 0, info.num_blocks, 0, 0, 0, 0, 0), replica)

    def engine_is_down(self, replica: int) -> None:
        """Record that an engine died and is being replaced."""
        self._metrics.restarts.add(1)
        self._metrics.replica_restarts.add(1, str(replica))
        self._metrics.replica_up.set(0, str(replica))

    def forget_replica(self, replica: int) -> None:
        """Remove a replica for good. What its engines counted stays in the totals."""
        metrics, label = self._metrics, str(replica)
        self._stats.pop(replica, None)
        self._counted.pop(replica, None)
        self._transfers.pop(replica, None)
        for gauge in (metrics.replica_up, metrics.replica_running, metrics.replica_waiting, metrics.replica_kv_usage):
            gauge.forget(label)
        self._set_totals()

    def set_queued(self, num_queued: int) -> None:
        """Set the number of requests that wait for an engine with room."""
        if num_queued != self._num_queued:
            self._num_queued = num_queued
            self._metrics.fleet_queued.set(num_queued)
            self._set_totals()

    def record_stats(self, stats: EngineStats, replica: int) -> None:
        """Update the metrics from the counters that a replica's engine reports after a step."""
        metrics, label, counted = self._metrics, str(replica), self._counted[replica]
        self._stats[replica] = stats
        self._set_totals()
        blocks = stats.blocks_held + stats.blocks_cached + stats.blocks_free
        metrics.replica_running.set(stats.num_running, label)
        metrics.replica_waiting.set(stats.num_waiting, label)
        metrics.replica_kv_usage.set(stats.blocks_held / blocks if blocks else 0.0, label)
        metrics.replica_steps.add(stats.steps - counted["steps"], label)
        metrics.replica_prefix_queries.add(stats.prefix_queried_tokens - counted["prefix_queried_tokens"], label)
        metrics.replica_prefix_hits.add(stats.prefix_hit_tokens - counted["prefix_hit_tokens"], label)
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
            counter.add(count - counted[name])
            counted[name] = count
        if stats.tier is not None:
            self._record_transfers(stats.tier, replica)

    def _record_transfers(self, stats: TierStats, replica: int) -> None:
        before, self._transfers[replica] = self._transfers[replica], stats
        for name in _TRANSFERS:
            self._metrics.block_transfers.add(getattr(stats, name) - getattr(before, name), name)

    def _set_totals(self) -> None:
        """Set the gauges that are totals over all engines."""
        metrics, all_stats = self._metrics, self._stats.values()
        held = sum(stats.blocks_held for stats in all_stats)
        cached = sum(stats.blocks_cached for stats in all_stats)
        free = sum(stats.blocks_free for stats in all_stats)
        metrics.running.set(sum(stats.num_running for stats in all_stats))
        metrics.waiting.set(sum(stats.num_waiting for stats in all_stats) + self._num_queued)
        metrics.kv_usage.set(held / (held + cached + free) if held + cached + free else 0.0)
        metrics.kv_blocks.set(held, "held")
        metrics.kv_blocks.set(cached, "cached")
        metrics.kv_blocks.set(free, "free")
        metrics.adapters_loaded.set(sum(stats.adapters_loaded for stats in all_stats))
        metrics.stored_blocks.set(sum(stats.tier.stored for stats in all_stats if stats.tier is not None))

    def record_step(self, step: StepRecord) -> None:
        """Observe the durations of a step's parts."""
        self._metrics.step_schedule.observe(step.schedule)
        self._metrics.step_execute.observe(step.execute)
        self._metrics.step_update.observe(step.update)
        self._metrics.tokens_a_step.observe(step.trace.num_tokens)

    def accepted(self, request: Request) -> None:
        """Record that a request was sent to the engine."""
        metrics, num_tokens = self._metrics, len(request.prompt_token_ids)
        metrics.prompt_tokens.add(num_tokens)
        metrics.request_prompt_tokens.observe(num_tokens)
        metrics.params_n.observe(request.params.n)
        if request.adapter is not None:
            metrics.adapter_requests.add(1, request.adapter.name)
        metrics.params_max_tokens.observe(request.params.max_tokens)
        self._progress[request.request_id] = _Progress(request.adapter.name if request.adapter else None)

    def output(self, request: Request, output: SequenceOutput, delta: CompletionDelta | None, now: float) -> None:
        """Record new tokens of one answer or, if the delta says so, its end."""
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
        """Record that all answers of a request ended."""
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

    def adapter_use(self) -> AdapterUse:
        """Adapters of open requests; a request runs once it has been in a step."""
        running, waiting = set[str](), set[str]()
        for one in self._progress.values():
            if one.adapter is not None:
                (waiting if one.first_scheduled is None else running).add(one.adapter)
        return AdapterUse(sorted(running), sorted(waiting))

    def dropped(self, request: Request) -> None:
        """Remove a request that was given up before its answers ended."""
        self._progress.pop(request.request_id, None)
