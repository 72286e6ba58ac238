"""Engines whose model `transformers` computes: what `--backend transformers` needs, and refuses."""

from importlib.util import find_spec

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.engine_config import AdapterConfig, EngineConfig
from penstock.config.machine import Machine
from penstock.config.model_facts import ModelFacts
from penstock.errors import ConfigError
from penstock.system.extras import require_torch

_PURPOSE = "backend transformers"


def read_other_facts(config: EngineConfig, checkpoint: Checkpoint) -> ModelFacts:
    """The facts of a model that `transformers` computes.

    Raises:
        ConfigError: an option is not supported with it, or torch or `transformers` is missing.
        CheckpointError: it has no class for the model, or the paged cache cannot serve its attention.
    """
    _check_options(config)
    require_torch(_PURPOSE)
    if find_spec("transformers") is None:
        raise ConfigError(f"{_PURPOSE} needs transformers: pip install '.[transformers]' in Penstock's source folder")
    from penstock.runner.transformers_model import read_transformers_model  # imports torch

    return read_transformers_model(checkpoint).facts


def without_kernels(machine: Machine) -> Machine:
    """The machine without native kernels: the reference computes the paged attention."""
    return machine.without_native_kernels(f"the models of {_PURPOSE}")


def _check_options(config: EngineConfig) -> None:
    model, speculation = config.model, config.speculation
    given = {
        "quantization": model.quantization is not None,
        "tensor_parallel_size": model.tensor_parallel_size > 1,
        "adapter": config.adapters != AdapterConfig(),
        "speculative_model": speculation.speculative_model is not None,
        "speculation=mtp": speculation.speculation == "mtp",
        "task": model.task in ("embed", "score"),
    }
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"{option} is not supported with {_PURPOSE}: leave one of them out")
