"""The models that the options of a server name, and the broker of their memory."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.checkpoint.checkpoint import find_on_disk, weights_size
from penstock.checkpoint.gguf.file import is_gguf, is_model_name, model_name, parts_of
from penstock.config.byte_counts import parse_bytes
from penstock.config.engine_config import EngineConfig
from penstock.errors import CheckpointError, ConfigError, shown
from penstock.fleet.model_broker import ModelBroker, PlanModel, reservation
from penstock.server.config import ServerConfig, seconds_of
from penstock.system.extras import has_torch
from penstock.system.host import free_memory

KEEP_ALIVE = "5m"
"""Default time without requests after which one of several models is unloaded; Ollama's."""
_NAMED = re.compile(r"(?P<name>[\w.:@/+-]{1,256})=(?P<model>.+)", re.ASCII | re.DOTALL)
_PLURAL = ("models_dir", "keep_alive")


def serves_several(engine_config: EngineConfig, config: ServerConfig) -> bool:
    """Whether models are loaded when used and unloaded when idle: several, or one that does not stay loaded."""
    return any(getattr(config, name) is not None for name in _PLURAL) or bool(_named(engine_config.model.model))


def listed_models(engine_config: EngineConfig, config: ServerConfig) -> list[tuple[str, EngineConfig]]:
    """Each model's name and configuration, in order; `max_memory` is what it reserves in the broker's plan.

    Raises:
        ConfigError: two have one name, there is none, or an option is not supported for several models.
    """
    _check(engine_config, config)
    given = engine_config.model.model
    models: list[tuple[str, str | None]] = [*_named(given)]
    if not models and (given is not None or config.models_dir is None):
        (name,) = config.served_model_names[:1] or [_own_name(given)]
        models = [(name, given)]
    elif config.served_model_names:
        raise ConfigError("served_model_name names a single model: with several, write --model NAME=MODEL")
    if config.models_dir is not None:
        models += _in_folder(config.models_dir)
    if not models:
        raise ConfigError(
            f"models_dir {config.models_dir} has no models: neither folders with config.json nor .gguf files"
        )
    names = [name for name, _ in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models have the name {name!r}: give each another, as NAME=MODEL")
    others = replace(engine_config.adapters, adapter=None)
    configs = [replace(engine_config, model=replace(engine_config.model, model=model)) for _, model in models]
    configs[1:] = [replace(own, adapters=others) for own in configs[1:]]
    return list(zip(names, configs, strict=True))


def with_broker(
    models: Sequence[tuple[str, EngineConfig]], config: ServerConfig
) -> tuple[list[tuple[str, EngineConfig]], ModelBroker, PlanModel]:
    """The broker of the models' memory, and the models with `max_memory` set to what each reserves there; and a planner
    of models that are added."""
    given = models[0][1].cache.max_memory
    total = free_memory() if given is None else parse_bytes(given)
    alive = config.keep_alive or (KEEP_ALIVE if len(models) > 1 or config.models_dir is not None else "-1")
    broker = ModelBroker(total, config.max_loaded_models, seconds_of(alive))

    def plan(own: EngineConfig, num_models: int) -> tuple[EngineConfig, int]:
        needed = min(total, reservation(_file_bytes(own), total, num_models, config.max_loaded_models))
        return replace(own, cache=replace(own.cache, max_memory=needed // config.engines)), needed

    planned = []
    for name, own in models:
        each, needed = plan(own, len(models))
        broker.add_model(name, needed)
        planned.append((name, own if len(models) == 1 else each))

    def plan_added(path: str, num_others: int) -> tuple[EngineConfig, int]:
        first = models[0][1]
        model = replace(first.model, model=path, revision=None)
        return plan(replace(first, model=model, adapters=replace(first.adapters, adapter=None)), num_others + 1)

    return planned, broker, plan_added


def _check(engine_config: EngineConfig, config: ServerConfig) -> None:
    for name, is_set in (
        ("cluster", config.cluster is not None),
        ("kv_disk", engine_config.cache.kv_disk is not None),
    ):
        if is_set:
            raise ConfigError(f"{name} is not supported with several models or keep_alive: leave one out")
    device = engine_config.model.device
    has_gpu = device.startswith("cuda") or (device == "auto" and has_torch() and any(Path("/dev").glob("nvidia[0-9]*")))
    if has_gpu and engine_config.cache.max_memory is None:
        raise ConfigError("with several models on a GPU, set max_memory to the bytes of its memory that they may share")


def _named(text: str | None) -> list[tuple[str, str]]:
    """The models of NAME=MODEL, several separated by commas; [] for a single model without a name."""
    if text is None or os.path.exists(os.path.expanduser(text)):
        return []
    found = [_NAMED.fullmatch(part.strip()) for part in text.split(",")]
    named = [(match["name"], match["model"]) for match in found if match is not None]
    if named and len(named) < len(found):
        raise ConfigError(f"of several models each must be NAME=MODEL, in {shown(text)}")
    return named


def _own_name(model: str | None) -> str:
    if model is None:
        return "penstock-demo"
    path = Path(os.path.expanduser(model))
    return (path.name if path.is_dir() else model_name(path)) if path.exists() else model


def _in_folder(folder: str) -> list[tuple[str, str]]:
    """The models in a folder, by name.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        entries = sorted(Path(os.path.expanduser(folder)).iterdir())
    except OSError as error:
        raise ConfigError(f"models_dir {folder} cannot be read: {error.strerror}") from None
    files = [entry.name for entry in entries if is_gguf(entry)]
    found = []
    for entry in entries:
        is_model = entry.is_dir() and ((entry / "config.json").is_file() or any(entry.glob("*.gguf")))
        if is_model or (entry.name in files and entry.name == min(parts_of(files, entry.name))):
            found.append((entry.name if is_model else model_name(entry), str(entry)))
    return [(name, path) for name, path in found if is_model_name(name)]


def _file_bytes(config: EngineConfig) -> int:
    """Size of a model's weights as files; 0 if they are not at a path on this machine."""
    try:
        path = find_on_disk(config.model.model, config.model.revision)
        return 0 if path is None else weights_size(path)  # else it is downloaded first
    except (CheckpointError, OSError):  # its load says so
        return 0
