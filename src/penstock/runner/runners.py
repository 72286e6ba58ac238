"""Makes the runner of a model by its settings: in this process, across several ranks, or by `transformers`."""

from typing import TYPE_CHECKING

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.settings import Settings
from penstock.runner.device_runner import DeviceRunner
from penstock.system.start import Start

if TYPE_CHECKING:
    from penstock.runner.mtp_runner import MTPRunner
    from penstock.runner.ranks import RankedRunner


def start_runner(
    checkpoint: Checkpoint, settings: Settings, start: Start | None = None
) -> "DeviceRunner | RankedRunner":
    """Create the runner for the settings: in this process, or across several ranks.

    Args:
        start: what was prepared in this process for loading the model.
    """
    if settings.backend == "transformers":
        from penstock.runner.transformers_runner import TransformersRunner  # imports torch

        return TransformersRunner(checkpoint, settings, start)
    if settings.tensor_parallel_size == 1:
        return DeviceRunner(checkpoint, settings, start=start)
    from penstock.runner.ranks import RankedRunner  # here: most engines have one rank

    return RankedRunner(checkpoint, settings, start)


def start_head(target: object, checkpoint: Checkpoint, settings: Settings) -> "MTPRunner":
    """Load the multi-token prediction head of a model that `start_runner` has started."""
    from penstock.runner.mtp_runner import MTPRunner  # here: few engines use one
    from penstock.runner.ranks import RankedRunner

    if isinstance(target, RankedRunner):
        return target.start_head(checkpoint, settings)
    assert isinstance(target, DeviceRunner), "a head reads hidden states of its model"
    return MTPRunner(target, checkpoint, settings)
