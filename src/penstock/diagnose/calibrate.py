"""Measures steps of a real engine, to fit the simulator's step costs to this machine.

penstock simulate --calibrate MODEL ──> measure() ──> fit() ──> a file of costs
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from penstock.api.request import FinishReason, Request
from penstock.api.sampling_params import ResolvedParams
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.config.settings import Settings
from penstock.core.plan import StepPlan, StepResult
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore, ModelRunner
from penstock.errors import ConfigError
from penstock.kernels.block_bytes import BlockBytes
from penstock.runner.device_runner import DeviceRunner
from penstock.simulator.cost_file import CostFile
from penstock.simulator.costs import MeasuredStep, StepShape, fit, median_error, shape_of

DECODES = 12
"""Decode steps per batch of sequences before the next batch."""
LONG_STEPS = 24
"""Total prompt tokens of the largest batch with long contexts, in multiples of a step's token budget."""
HELD_OUT = 4
"""One step in this many is held out of the fit, to measure the prediction error."""
MIN_STEPS = 2 * HELD_OUT


class ShapeRecorder:
    """A runner that records the shape of the latest step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.shape = StepShape(0, 0, 0, 0)

    def execute(self, plan: StepPlan) -> StepResult:
        self.shape = shape_of(plan)
        return self._runner.execute(plan)

    @property
    def blocks(self) -> Sequence[BlockBytes] | None:
        return self._runner.blocks

    def close(self) -> None:
        self._runner.close()


class MeasuredEngine:
    """An engine that returns the shape and the seconds of each step."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Raises:
            ConfigError, CheckpointError: see `build_engine`.
        """
        self._recorder: ShapeRecorder | None = None

        def make_runner(checkpoint: Checkpoint, settings: Settings) -> ModelRunner:
            self._recorder = ShapeRecorder(DeviceRunner(checkpoint, settings))
            return self._recorder

        self.core: EngineCore = build_engine(config, make_runner=make_runner, clock=clock)
        self.steps: list[MeasuredStep] = []

    def step(self) -> None:
        """Run one step and record its shape and duration."""
        self.core.step()
        record, recorder = self.core.last_step, self._recorder
        if record is not None and recorder is not None:
            self.steps.append(MeasuredStep(recorder.shape, record.seconds))

    def close(self) -> None:
        self.core.close()


def calibrate(config: EngineConfig, seconds: float, clock: Callable[[], float] = time.monotonic) -> CostFile:
    """Measure an engine, and fit costs to its steps.

    Args:
        seconds: duration of the measurement, without loading the model.

    Raises:
        ConfigError: too few steps fit the duration; see also `build_engine`.
        CheckpointError: see `build_engine`.
    """
    engine = MeasuredEngine(config, clock)
    try:
        steps = measure(engine, seconds, clock)
        settings = engine.core.settings
    finally:
        engine.close()
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{seconds:g} s were enough for {len(steps)} steps only: measure longer (calibrate_seconds)")
    held_out = steps[::HELD_OUT]
    trial = fit([step for index, step in enumerate(steps) if index % HELD_OUT])
    return CostFile(
        costs=fit(steps),
        settings=settings,
        median_error=median_error(trial, held_out),
        num_steps=len(steps),
    )


def measure(engine: MeasuredEngine, seconds: float, clock: Callable[[], float] = time.monotonic) -> list[MeasuredStep]:
    """Measure steps of many shapes: batches of all sizes with short, mixed and long contexts, single prompts, random
    traffic.
    """
    settings = engine.core.settings
    rng = Random(2026)
    scenes = list(_scenes(settings, rng))
    _play(engine, rng, scenes[-1][:2], math.inf, clock)  # the first steps touch memory that later ones find
    engine.steps.clear()
    ends = clock() + seconds
    while clock() < ends:
        for index, scene in enumerate(scenes):
            left = ends - clock()
            if left > 0 or not engine.steps:
                _play(engine, rng, scene, clock() + max(left, 0.0) / (len(scenes) - index) * 2, clock)
    return engine.steps[:]


class SceneRequest(NamedTuple):
    """A request of a scene."""

    step: int
    """Step in which it arrives."""
    prompt: int
    """Number of prompt tokens."""
    answer: int
    text: int | None = None
    """Number of the text whose beginning is the prompt, so that later scenes find it in the prefix cache; None: a new
    text."""


Scene = list[SceneRequest]


def _scenes(settings: Settings, rng: Random) -> Iterator[Scene]:
    longest = min(settings.max_model_len, settings.memory.num_tokens) - DECODES - 1
    budget = settings.max_num_batched_tokens
    batch = settings.max_num_seqs
    long = min(longest, LONG_STEPS * budget // batch, settings.memory.num_tokens // 2 // batch)
    while batch:
        for most in (32, 4 * budget):
            lengths = [_length(rng, min(most, longest, 16 * budget // batch)) for _ in range(batch)]
            yield [SceneRequest(0, length, DECODES) for length in lengths]
        yield [SceneRequest(0, max(1, long), DECODES, text) for text in range(batch)]
        batch //= 2
    yield [SceneRequest(4 * step, _length(rng, min(2 * budget, longest)), 2) for step in range(24)]
    arrivals = sorted(rng.randrange(300) for _ in range(40))
    yield [SceneRequest(step, _length(rng, min(2 * budget, longest)), rng.randint(1, 4 * DECODES)) for step in arrivals]


def _length(rng: Random, most: int) -> int:
    """A random length from 4 to `most`, uniform in its logarithm."""
    return round(math.exp(rng.uniform(math.log(4), math.log(max(4, most)))))


def _play(engine: MeasuredEngine, rng: Random, scene: Scene, ends: float, clock: Callable[[], float]) -> None:
    """Run the steps of a scene until its end or the time `ends`."""
    core, step = engine.core, 0
    waiting = scene[::-1]
    names: list[str] = []
    while (waiting or core.has_work) and clock() < ends:
        while waiting and (waiting[-1].step <= step or not core.has_work):
            item = waiting.pop()
            names.append(f"{len(engine.steps)}-{len(names)}")
            prompt = _tokens(rng if item.text is None else Random(item.text), core, item.prompt)
            core.add_request(make_request(names[-1], prompt, item.answer, clock()))
        engine.step()
        step += 1
    for name in names:
        core.finish_request(name, None, FinishReason.ABORT)
    while core.has_work:
        core.step()


def _tokens(rng: Random, core: EngineCore, count: int) -> "array[int]":
    return array("i", (rng.randrange(core.info.vocab_size) for _ in range(count)))


def make_request(name: str, prompt: "array[int]", max_tokens: int, arrival: float) -> Request:
    """A greedy request for exactly this many answer tokens."""
    params = ResolvedParams(1, 0.0, 0, 1.0, 0.0, 0, max_tokens, 0, (), None)
    return Request(name, tuple(prompt), params, arrival)
