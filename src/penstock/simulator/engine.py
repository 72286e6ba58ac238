"""A simulated engine: the production scheduler and KV manager, with a cost model instead of a model.

    add_request ──inbox──> begin: schedule() ──costs.seconds──> end: update() ──> outputs, to the fleet
                                  or a run of decodes (`decode_run`)

Like the engine process, it reads messages between two steps.
"""

from array import array
from collections.abc import Mapping
from typing import Protocol

from penstock.api.request import Request, Resumed, SequenceOutput
from penstock.api.sampling_params import MAX_N
from penstock.config.settings import Settings
from penstock.core.build import make_scheduler
from penstock.core.plan import StepPlan, StepResult
from penstock.dataclass import dataclass
from penstock.simulator.clock import Event, Kind, VirtualClock
from penstock.simulator.costs import StepCosts, shape_of
from penstock.simulator.decode_run import DecodeRun, apply_run, find_run, is_pure_decode
from penstock.simulator.histogram import Histogram

_NEVER = -1


@dataclass(slots=True, eq=False)
class Progress:
    """The progress of a request."""

    answer: "array[int]"
    """The tokens of its answer."""
    latest: float = 0.0
    """Time of its latest token, if `latest_step` is not the engine's latest."""
    latest_step: int | None = None
    """The engine's step (not counting runs) of its latest token; None before the first token."""


class Listener(Protocol):
    """Receives an engine's events."""

    def stepped(self, engine: "SimulatedEngine", outputs: list[SequenceOutput]) -> None:
        """Called at the end of a step, with its samples; runs are reported to `ran`."""

    def ran(self, engine: "SimulatedEngine", num_steps: int) -> None:
        """Called at the end of a run: each sequence got `num_steps` tokens; 0 if the engine died in its first step."""


@dataclass(slots=True)
class Counts:
    """Counts of an engine and its successors."""

    steps: int = 0
    tokens: int = 0
    """Number of computed tokens."""
    preemptions: int = 0
    seconds: float = 0.0
    """Busy seconds."""


class SimulatedEngine:
    """Schedules steps like an engine, and reports the outputs of each when its time is over."""

    def __init__(
        self,
        replica: int,
        settings: Settings,
        costs: StepCosts,
        clock: VirtualClock,
        progress: Mapping[str, Progress],
        listener: Listener,
        latencies: Histogram,
        *,
        runs: bool = True,
    ) -> None:
        """
        Args:
            replica: its number in the fleet.
            progress: the progress of all requests, by id.
            latencies: collects the inter-token latencies.
            runs: whether pure decode steps may be applied many at a time, which only makes the simulation faster.
        """
        self.replica = replica
        self.counts = Counts()
        self.is_up = False
        self._settings = settings
        self._costs = costs
        self._clock = clock
        self._progress = progress
        self._listener = listener
        self._latencies = latencies
        self._runs = runs
        self.start()

    def start(self) -> None:
        """Start, with an empty cache."""
        self.is_up = True
        self.scheduler = make_scheduler(self._settings, None, self._clock)
        self._inbox: list[tuple[Request, Resumed]] = []
        self._finishing: list[str] = []
        self._names: list[str] = []  # of its requests, as they came
        self._plan: StepPlan | None = None
        self._run: DecodeRun | None = None
        self._end: Event | None = None  # of what is under way
        self._began = self._ended = self._clock.now
        self._num_planned = 0
        self._is_decoding = False  # whether the latest step was of decodes alone

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_request(self, request: Request, resumed: Resumed = ()) -> None:
        """Queue a new request."""
        self._inbox.append((request, resumed))
        self._wake()

    def expire(self, request_id: str) -> None:
        """Expire a request that has waited for its maximum time."""
        self._finishing.append(request_id)
        self._wake()

    def _wake(self) -> None:
        """Read the messages at the end of the current step, or now if there is none."""
        if self._end is None:
            self._end = self._clock.at(self._clock.now, self._begin, Kind.STEP_BEGIN)
        elif self._run is not None:
            num_steps = self._run.steps_begun(self._clock.now)
            if num_steps < self._run.num_steps:
                self._run.num_steps = num_steps
                self._end.cancel()
                self._end = self._clock.at(self._run.ends(num_steps), self._end_run, Kind.STEP_END)

    def die(self) -> tuple[dict[str, tuple[int, ...]], list[int]]:
        """The process ends.

        Returns its requests, each with the tokens that were sent, and the arrival numbers of those in the current step.
        """
        now = self._clock.now
        computing: list[int] = []
        if self._run is not None:
            run, done = self._run, self._run.steps_begun(now)
            if run.ends(done) > now:
                done -= 1
            self._apply(run, done)
            self._listener.ran(self, done)
            self.counts.seconds += now - self._ended
            computing = [seq.ordinal for seq in self.scheduler.running]
        elif self._plan is not None:
            computing = self.scheduler.request_indices()
            self.counts.seconds += now - self._began
        if self._end is not None:
            self._end.cancel()
        self.counts.preemptions += self.scheduler.num_preemptions
        self.is_up = False
        tokens = {request.request_id: (resumed[0] if resumed else None) or () for request, resumed in self._inbox}
        for seq in (*self.scheduler.running, *self.scheduler.queue.in_order()):
            tokens[seq.request_id] = tuple(seq.tokens[seq.num_prompt_tokens :])
            self._leave_step(seq.request_id)
        return tokens, computing

    def _leave_step(self, request_id: str) -> None:
        """Note that a request of the latest step is not in the next one."""
        progress = self._progress[request_id]
        if progress.latest_step == self._num_planned:
            progress.latest, progress.latest_step = self._ended, _NEVER

    @property
    def num_preemptions(self) -> int:
        return self.counts.preemptions + (self.scheduler.num_preemptions if self.is_up else 0)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Read the messages, and begin a step or a run if there is work."""
        has_news = self._take_messages()
        self._end = None
        self._began = self._clock.now
        if self._runs and self._is_decoding and not has_news:
            self._run = find_run(self.scheduler, self._costs, self._began)
            if self._run is not None:
                self._end = self._clock.at(self._run.ends(self._run.num_steps), self._end_run, Kind.STEP_END)
                return
        self._plan = plan = self.scheduler.schedule()
        if plan is None:
            outputs = self.scheduler.drain()
            if outputs:
                self._listener.stepped(self, outputs)
            return
        for request_id in self.scheduler.trace.preempted:
            self._leave_step(request_id)
        self._is_decoding = is_pure_decode(plan)
        seconds = self._costs.seconds(shape_of(plan, self.scheduler.trace.encoded_tokens))
        self._end = self._clock.at(self._began + seconds, self._end_step, Kind.STEP_END)

    def _take_messages(self) -> bool:
        """Handle the queued messages; returns whether there were any."""
        if not self._inbox and not self._finishing:
            return False
        for request, resumed in self._inbox:
            self._names.append(request.request_id)
            self.scheduler.add_request(request, resumed)
        for request_id in self._finishing:
            self.scheduler.expire(request_id)
        self._inbox.clear()
        self._finishing.clear()
        return True

    def _end_step(self) -> None:
        plan, now = self._plan, self._clock.now
        assert plan is not None, "no step is under way"
        names, progress = self._names, self._progress
        tokens: list[int | None] = [
            progress[names[seq.sequence_id // MAX_N]].answer[position - seq.prompt_len]
            for seq, position in zip(plan.samples.sequences, plan.samples.positions, strict=True)
        ]
        outputs = self.scheduler.update(StepResult(tokens))
        self._plan = None
        self._count(1, len(plan.forward.token_ids), now - self._began)
        self._num_planned += 1
        for output in outputs:
            if output.token_ids:
                self._note_token(progress[output.request_id], now)
        self._ended = now
        self._begin()
        self._listener.stepped(self, outputs)

    def _note_token(self, progress: Progress, now: float) -> None:
        if progress.latest_step is not None:
            follows = progress.latest_step == self._num_planned - 1
            self._latencies.add(now - (self._ended if follows else progress.latest))
        progress.latest_step = self._num_planned
        progress.latest = now

    def _end_run(self) -> None:
        run = self._run
        assert run is not None, "no run is under way"
        self._apply(run, run.num_steps)
        self._listener.ran(self, run.num_steps)
        self._begin()

    def _apply(self, run: DecodeRun, num_steps: int) -> None:
        """Record the tokens of a run."""
        self._run = None
        progress = self._progress
        apply_run(
            self.scheduler,
            num_steps,
            {seq.request_id: progress[seq.request_id].answer for seq in self.scheduler.running},
        )
        self._ended = run.ends(num_steps)
        self._count(num_steps, num_steps * run.num_sequences, self._ended - run.began)
        self._latencies.add_series(run.first, run.growth, num_steps, run.num_sequences)

    def _count(self, steps: int, tokens: int, seconds: float) -> None:
        self.counts.steps += steps
        self.counts.tokens += tokens
        self.counts.seconds += seconds
