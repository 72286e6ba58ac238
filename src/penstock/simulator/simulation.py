"""Simulates a fleet of engines behind a queue, from the first arrival to the last answer.

    Arrival ──> Admission ──> Dispatcher (queue, router) ──> SimulatedEngine ──> Outcome
                 refused          ▲                              │
                                  └──────── an engine died ──────┘

The server's own code makes all decisions: limits, the fleet's queue and router, each engine's scheduler and cache.
"""

import gc
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import partial
from typing import cast

from penstock.api.request import ErrorReason, Request, SequenceOutput
from penstock.api.sampling_params import ResolvedParams
from penstock.config.settings import Settings
from penstock.dataclass import dataclass
from penstock.errors import ConfigError, OverloadedError, PromptTooLongError
from penstock.fleet.dispatch import Dispatcher
from penstock.fleet.placement import Capacity
from penstock.fleet.request import FleetRequest
from penstock.fleet.router import ROUTERS
from penstock.frontend.limits import Admission, Admitted, Caller, QueueLimits
from penstock.simulator.clock import VirtualClock
from penstock.simulator.costs import StepCosts
from penstock.simulator.engine import Counts, Progress, SimulatedEngine
from penstock.simulator.histogram import Histogram
from penstock.simulator.workload import Arrival, Workload

TOO_LONG = "longer than an engine takes"
NO_IMAGE = "an image that the model cannot encode"
"""Reasons of refusals that more engines would not avoid."""
REPORTED_STEPS = 2
"""Steps with output after which a request is proven harmless, so the dispatcher needs no further reports."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The death of an engine."""

    time: float
    replica: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet to simulate.

    Raises:
        ConfigError: an option is out of its range.
    """

    settings: Settings
    """Of each engine."""
    costs: StepCosts
    num_engines: int = 1
    router: str = "prefix"
    limits: QueueLimits = field(default_factory=QueueLimits)
    failures: tuple[Failure, ...] = ()
    restart_seconds: float = 5.0
    """Seconds from an engine's death until its successor is up."""

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ConfigError(f"engines must be at least 1, not {self.num_engines}")
        if self.router not in ROUTERS:
            raise ConfigError(f"router must be one of {', '.join(ROUTERS)}; not {self.router!r}")
        for failure in self.failures:
            if not 0 <= failure.replica < self.num_engines or failure.time < 0:
                raise ConfigError(
                    f"no engine {failure.replica} can fail at {failure.time:g} s: they are 0 to {self.num_engines - 1}"
                )


@dataclass(slots=True)
class Outcome:
    """The results of all requests; times in seconds."""

    first_tokens: "array[float]" = field(default_factory=lambda: array("d"))
    """Time to first token."""
    ends: "array[float]" = field(default_factory=lambda: array("d"))
    """End-to-end latency."""
    latencies: Histogram = field(default_factory=Histogram)
    """Inter-token latency."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refused requests by reason."""
    moved: int = 0
    """Number of requests resumed on another engine after a death."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    answer_tokens: int = 0
    seconds: float = 0.0
    """From the first arrival to the last event."""
    engines: list[Counts] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return sum(counts.steps for counts in self.engines)


@dataclass(slots=True, eq=False, kw_only=True)
class _OpenRequest(FleetRequest):
    """An open request."""

    arrival: Arrival
    admitted: Admitted
    first_token: float | None = None
    steps_reported: int = 0
    tokens: tuple[int, ...] = ()
    """Tokens from engines that have died."""


class Simulation:
    """One run of a workload; `run` may be called once."""

    def __init__(self, fleet: Fleet, workload: Workload, *, runs: bool = True) -> None:
        """
        Args:
            runs: see `SimulatedEngine`.
        """
        settings = fleet.settings
        self._fleet = fleet
        self._settings = settings
        self._arrivals: Iterator[Arrival] = workload.arrivals()
        self._clock = VirtualClock()
        self._outcome = Outcome()
        self._progress: dict[str, Progress] = {}
        self._open: dict[str, _OpenRequest] = {}
        self._is_recovering = False
        self._num_to_come = 0
        self._admission = Admission(
            fleet.limits,
            settings.max_num_seqs * fleet.num_engines,
            self._expire,
            self._clock,
            self._clock.call_later,
        )
        self._dispatcher = Dispatcher(ROUTERS[fleet.router](), settings.policy)
        self._capacity = Capacity(
            settings.memory.num_blocks,
            settings.memory.block_size,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_model_len,
            "simulated",
        )
        self._engines = [
            SimulatedEngine(
                replica, settings, fleet.costs, self._clock, self._progress, self, self._outcome.latencies, runs=runs
            )
            for replica in range(fleet.num_engines)
        ]

    def run(self) -> Outcome:
        """Run until the last request has ended."""
        for replica in range(len(self._engines)):
            self._dispatcher.add_replica(replica, self._capacity)
        for failure in self._fleet.failures:
            self._clock.at(failure.time, partial(self._die, failure.replica))
        self._await_next()
        collects = gc.isenabled()
        gc.disable()  # a fifth of the time goes into looking at the trees of all engines: none of it is garbage
        try:
            self._clock.run(lambda: not (self._open or self._num_to_come))
        finally:
            if collects:
                gc.enable()
        self._outcome.seconds = self._clock.now
        for engine in self._engines:
            engine.counts.preemptions = engine.num_preemptions
            self._outcome.engines.append(engine.counts)
        return self._outcome

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _await_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._await(arrival, is_first=True)

    def _await(self, arrival: Arrival, *, is_first: bool = False) -> None:
        self._num_to_come += 1

        def arrive() -> None:
            self._num_to_come -= 1
            if is_first:
                self._await_next()
            self._arrive(arrival)

        self._clock.at(max(arrival.time, self._clock.now), arrive)

    def _arrive(self, arrival: Arrival) -> None:
        max_tokens = len(arrival.answer)
        params = ResolvedParams(1, 0.0, 0, 1.0, 0.0, 0, max_tokens, 0, (), None)
        prompt = cast("tuple[int, ...]", arrival.prompt)  # an array has what is asked of it, and takes a tenth
        request = Request(
            arrival.name,
            prompt,
            params,
            self._clock.now,
            priority=arrival.priority,
            namespace=arrival.namespace,
            tenant=arrival.tenant,
            images=arrival.images,
        )
        admitted = self._admit(request)
        if admitted is None:
            return
        open_request = self._open[request.request_id] = _OpenRequest(request, arrival=arrival, admitted=admitted)
        self._progress[request.request_id] = Progress(arrival.answer)
        self._dispatcher.add_request(open_request)
        self._hand_over()

    def _admit(self, request: Request) -> Admitted | None:
        """Count a request in the limits; None if it is refused."""
        refusal, images = TOO_LONG, self._settings.images
        if any(images is None or images.refusal(image) is not None for image in request.images):
            refusal = NO_IMAGE
        elif len(request.prompt_token_ids) + request.params.max_tokens <= self._settings.max_model_len:
            try:
                (admitted,) = self._admission.enter([request], Caller(tenant=request.tenant), None)
                return admitted
            except OverloadedError:
                refusal = "the queue is full"
            except PromptTooLongError:
                pass
        self._outcome.refused[refusal] += 1
        return None

    def _hand_over(self) -> None:
        for replica, due in self._dispatcher.due():
            open_request = self._open[due.request_id]
            self._engines[replica].add_request(
                open_request.request, (open_request.tokens,) if open_request.tokens else ()
            )

    def _expire(self, request_id: str) -> None:
        replica = self._open[request_id].replica
        if replica is None:
            self._end(request_id, "waited too long")
        elif self._engines[replica].is_up:
            self._engines[replica].expire(request_id)

    def _end(self, request_id: str, refusal: str | None = None) -> None:
        open_request = self._open.pop(request_id)
        del self._progress[request_id]
        self._dispatcher.remove_request(open_request, [] if refusal else [open_request.arrival.answer])
        self._admission.left(open_request.admitted)
        if refusal is not None:
            self._outcome.refused[refusal] += 1
            return
        now, arrival = self._clock.now, open_request.arrival
        assert open_request.first_token is not None, "an answer is whole that has not begun"
        self._outcome.first_tokens.append(open_request.first_token - open_request.request.arrival)
        self._outcome.ends.append(now - open_request.request.arrival)
        self._outcome.prompt_tokens += len(arrival.prompt)
        self._outcome.answer_tokens += len(arrival.answer)
        following = arrival.follow(now) if arrival.follow is not None else None
        arrival.follow = None  # it may refer to the arrival
        if following is not None:
            self._await(following)

    # ── events of engines ────────────────────────────────────────────────────────────────────────────────────────────

    def stepped(self, engine: SimulatedEngine, outputs: Sequence[SequenceOutput]) -> None:
        """See `Listener`."""
        freed = False
        for output in outputs:
            freed |= self._take(engine, output)
        if self._is_recovering:
            self._is_recovering = self._dispatcher.has_waiting
            self._hand_over()
        elif freed and self._dispatcher.num_queued:
            self._hand_over()

    def _take(self, engine: SimulatedEngine, output: SequenceOutput) -> bool:
        """Record an output; returns whether the engine may take another request: after a first or a last output."""
        open_request = self._open[output.request_id]
        is_first, is_last = open_request.first_token is None, output.finish_reason is not None
        open_request.steps_reported += 1
        # Only reports that can change what the dispatcher does: the others would cost time in each step.
        if open_request.steps_reported <= REPORTED_STEPS or is_last or self._dispatcher.num_queued:
            self._record(engine, open_request, output)
        if output.error_reason is ErrorReason.EXPIRED:
            self._end(output.request_id, "waited too long")
            return True
        if is_first:
            open_request.first_token = self._clock.now
            self._outcome.cached_tokens += output.num_cached_tokens
            self._admission.output(open_request.admitted, 1)
        if is_last:
            self._end(output.request_id)
        return open_request.steps_reported == 1 or is_last

    def ran(self, engine: SimulatedEngine, num_steps: int) -> None:
        """See `Listener`; charges tenants for their tokens and marks requests as proven."""
        others_wait = self._dispatcher.num_queued and len(self._engines) > 1
        for seq in engine.scheduler.running if num_steps else ():
            open_request = self._open[seq.request_id]
            if others_wait or open_request.steps_reported < REPORTED_STEPS:
                open_request.steps_reported += num_steps
                self._record(engine, open_request, SequenceOutput(seq.request_id, 0, [0] * num_steps))

    def _record(self, engine: SimulatedEngine, open_request: _OpenRequest, output: SequenceOutput) -> None:
        replica = self._dispatcher.replicas[engine.replica]
        self._dispatcher.record_output(replica, open_request, output, engine.counts.steps)

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _die(self, replica: int) -> None:
        engine = self._engines[replica]
        if not engine.is_up:
            return
        tokens, computing = engine.die()
        for request_id, sampled in tokens.items():
            self._open[request_id].tokens = sampled
            self._open[request_id].steps_reported = 0
        convict = self._dispatcher.engine_died(replica, computing, fault=False)
        if convict is not None:
            self._end(convict.request_id, "its engine died again and again")
        self._outcome.moved += sum(self._open[name].replica is None for name in tokens if name in self._open)
        # Until no request waits: each output may prove a suspect harmless, and let others follow.
        self._is_recovering = True
        self._clock.call_later(self._fleet.restart_seconds, lambda: self._restart(replica))
        self._hand_over()

    def _restart(self, replica: int) -> None:
        self._engines[replica].start()
        self._dispatcher.engine_up(replica, self._capacity)
        self._hand_over()
