"""The engine with a runner that costs nothing: real scheduler, real processes, and the same token always."""

import os
import time

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.config.settings import Settings
from penstock.core.plan import StepPlan, StepResult
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.system.start import Start

TOKEN = 300


class NullRunner:
    """Samples the same token for everybody."""

    blocks = None

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([TOKEN] * len(plan.samples))

    def close(self) -> None:
        pass


def build_null_engine(config: EngineConfig, start: Start) -> EngineCore:
    """As `build_engine`, with nothing that computes."""
    return build_engine(config, make_runner=NullRunner, start=start)


class PacedRunner(NullRunner):
    """Takes `PENSTOCK_BENCHMARK_STEP` seconds for each step."""

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(float(os.environ["PENSTOCK_BENCHMARK_STEP"]))
        return super().execute(plan)


def build_paced_engine(config: EngineConfig, start: Start) -> EngineCore:
    """As `build_null_engine`, with steps that take their time."""
    return build_engine(config, make_runner=PacedRunner, start=start)
