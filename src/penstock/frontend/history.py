"""A history of the last minutes: requests and steps, which explain a request's latency.

It computes nothing until it is asked: a step costs one append, a request a few. Steps are stored encoded, many per
chunk: this takes half the memory of objects, and does not scatter small objects over the space that large bodies leave
free.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

import msgspec

from penstock.api.request import Request
from penstock.dataclass import dataclass
from penstock.engine.info import StepRecord

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
    num_generated: int = 0
    """Tokens generated, in all answers."""
    finish_reasons: list[str] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    """(time, replica) of each handover to an engine."""

    def replica_at(self, time: float) -> int | None:
        """The engine's replica at this time; None while the request waited for one."""
        return next((replica for since, replica in reversed(self.replicas) if since <= time), None)

    def handed_over(self, replica: int, now: float) -> None:
        """Record that the request was sent to the engine of this replica."""
        self.replicas.append((now, replica))

    def progressed(self, now: float, num_tokens: int, finish_reason: str | None) -> None:
        """Record tokens, or the end of one of the answers."""
        self.num_generated += num_tokens
        if finish_reason is None:
            if self.first_token is None:
                self.first_token = now
            return
        self.finish_reasons.append(finish_reason)
        if len(self.finish_reasons) == self.n:
            self.ended = now


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
        self.num_steps = 0
        """Steps recorded so far, with those that are no longer kept."""

    def accepted(self, request: Request, alias: str | None) -> RequestRecord:
        """Record a new request; `alias` is another name of its call."""
        # The oldest goes, ended or not: the table is for looking back, and has no part in any request.
        while len(self._records) >= MAX_REQUESTS:
            del self._records[next(iter(self._records))]
        record = self._records[request.request_id] = RequestRecord(
            request.request_id,
            alias,
            request.tenant,
            request.priority,
            len(request.prompt_token_ids),
            request.params.n,
            request.arrival,
        )
        return record

    def record_step(self, step: StepRecord) -> None:
        self._latest.append(step)
        self.num_steps += 1
        if len(self._latest) == STEPS_A_PIECE:
            first, ended = self._latest[0], step.began + step.seconds
            # Encoded, they take less memory, and the garbage collector has nothing to visit.
            self._pieces.append(_Piece(first.began, ended, _ENCODER.encode(self._latest)))
            self._latest.clear()
        while self._pieces and self._pieces[0].ended < step.began - MAX_SECONDS:
            self._pieces.popleft()

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

    def newest_steps(self, count: int) -> list[StepRecord]:
        """The last `count` recorded steps, or as many as are kept, in the order in which they were recorded."""
        missing = max(0, count - len(self._latest))
        pieces = list(itertools.islice(reversed(self._pieces), math.ceil(missing / STEPS_A_PIECE)))
        steps = [*itertools.chain(*(_DECODER.decode(piece.encoded) for piece in reversed(pieces))), *self._latest]
        return steps[max(0, len(steps) - count) :]

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
            begin = max(step.began, arrival)  # a request may come during a step
            at, seconds = round(begin - arrival, 6), round(step.began + step.seconds - begin, 6)
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
            elif trace.blocked is not None and request_id not in trace.preempted and seconds > 0:
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
