"""An engine whose device is lost once, in a step that computes a given token."""

from pathlib import Path

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.config.settings import Settings
from penstock.core.plan import StepPlan, StepResult
from penstock.engine.build import build_engine
from penstock.engine.core import EngineCore
from penstock.runner.device_runner import DeviceRunner
from penstock.system.start import Start

LOSING_ENGINE = "tests.engine.losing_engine:build_losing_engine"
FATAL, FAULTY = 301, 302
"""Tokens: the device is lost over the first, until there is a file `lost` in the checkpoint's folder; a step with the
second fails, and no other."""


class LosingRunner(DeviceRunner):
    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        super().__init__(checkpoint, settings)
        self.lost = Path(checkpoint.path) / "lost"

    def execute(self, plan: StepPlan) -> StepResult:
        if FATAL in plan.forward.token_ids and not self.lost.exists():
            self.lost.touch()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if FAULTY in plan.forward.token_ids:
            raise RuntimeError("a kernel has a bug")
        return super().execute(plan)


def build_losing_engine(config: EngineConfig, start: Start | None = None) -> EngineCore:
    return build_engine(config, make_runner=LosingRunner, start=start)
