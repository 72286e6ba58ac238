"""The models that the options of a server name, and the broker of their memory."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.added import Added
from penstock.checkpoint.checkpoint import find_on_disk, weights_size
from penstock.checkpoint.gguf.file import is_gguf, is_model_name, model_name, parts_of
from penstock.checkpoint.local import find_whole
from penstock.config.byte_counts import parse_bytes
from penstock.config.engine_config import EngineConfig
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, ConfigError, shown
from penstock.fleet.model_broker import ModelBroker, PlanModel, reservation
from penstock.server.config import ServerConfig, seconds_of
from penstock.system.extras import has_torch
from penstock.system.host import free_memory

if TYPE_CHECKING:
    from penstock.frontend.served_model import ServedModel

KEEP_ALIVE = "5m"
"""Default time without requests after which one of several models is unloaded; Ollama's."""
_NAMED = re.compile(r"(?P<name>[\w.:@/+-]{1,256})=(?P<model>.+)", re.ASCII | re.DOTALL)
_PLURAL = ("models_dir", "keep_alive")


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One of several models."""

    name: str
    config: EngineConfig
    other_names: tuple[str, ...] = ()
    is_added: bool = False
    """Whether it was added to an earlier server."""
    has_own_name: bool = True
    """Whether it is served by `name`, too: a client may have deleted that."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Paths of adapters that were added to it, by name."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its names and those of the added adapters."""
        own = (self.name,) if self.has_own_name else ()
        return (*own, *self.other_names, *self.adapters)

    def served(self) -> "ServedModel":
        """The model to serve."""
        from penstock.frontend.served_model import ServedModel  # here: a server's own imports come after its launch

        return ServedModel(self.name, self.config, self.other_names, self.adapters, has_own_name=self.has_own_name)


def serves_several(engine_config: EngineConfig, config: ServerConfig) -> bool:
    """Whether models are loaded when used and unloaded when idle: several, or one that does not stay loaded."""
    return any(getattr(config, name) is not None for name in _PLURAL) or bool(_named(engine_config.model.model))


def listed_models(engine_config: EngineConfig, config: ServerConfig) -> list[ListedModel]:
    """The models that the options name, in order.

    Raises:
        ConfigError: two have one name, or an option is not supported for several models.
    """
    _check(engine_config, config)
    given = engine_config.model.model
    models: list[tuple[str, str | None]] = [*_named(given)]
    other_names: list[str] = []
    if not models and (given is not None or config.models_dir is None):
        name, *other_names = config.served_model_names or [_own_name(given)]
        models = [(name, given)]
    elif config.served_model_names:
        raise ConfigError("served_model_name names a single model: with several, write --model NAME=MODEL")
    if config.models_dir is not None:
        models += _in_folder(config.models_dir)
    names = [name for name, _ in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models have the name {name!r}: give each another, as NAME=MODEL")
    first = [ListedModel(name, _config_of(engine_config, model), tuple(other_names)) for name, model in models[:1]]
    return first + [ListedModel(name, _other_config(engine_config, model)) for name, model in models[1:]]


def _config_of(engine_config: EngineConfig, model: str | None) -> EngineConfig:
    return replace(engine_config, model=replace(engine_config.model, model=model))


def _other_config(engine_config: EngineConfig, model: str | None) -> EngineConfig:
    """The configuration of a model but the first, which has the adapters of the options."""
    own = _config_of(engine_config, model)
    return replace(own, adapters=replace(own.adapters, adapter=None))


def with_added(
    models: Sequence[ListedModel], added: Added, engine_config: EngineConfig, config: ServerConfig
) -> tuple[list[ListedModel], list[str]]:
    """The models of the options, and those that were added to an earlier server, whose names are not taken; and
    warnings about the ones that cannot be served.

    Raises:
        ConfigError: there is no model.
    """
    found, warnings = list(models), list[str]()
    taken = {name for model in models for name in (model.name, *model.other_names)} | {*engine_config.adapters.paths}
    for name in added.models:
        if name in taken:
            continue  # the options say what it is now
        try:
            path = find_whole(name)
            reason = "its files are not on this machine any more"
        except (ConfigError, OSError) as error:
            path, reason = None, str(error)
        if path is None:
            warnings.append(f"the model {name}, which was added to an earlier server, is not served: {reason}")
        else:
            own = _other_config(engine_config, path)
            own = replace(own, model=replace(own.model, revision=None))
            found.append(ListedModel(name, own, is_added=True, has_own_name=name not in added.deleted))
    if not found:
        raise ConfigError(
            f"models_dir {config.models_dir} has no models: neither folders with config.json nor .gguf files"
        )
    named = (_with_names(model, added, taken | {*added.models}) for model in found)
    return [model for model in named if model.has_own_name or model.other_names], warnings


def _with_names(model: ListedModel, added: Added, taken: Collection[str]) -> ListedModel:
    """A model with the names and adapters that were added to it, unless the options give these names to others."""
    names = (name for name in added.names_of(model.name) if name not in taken)
    adapters = {name: path for name, path in added.adapters_of(model.name).items() if name not in taken}
    return replace(model, other_names=(*model.other_names, *names), adapters=adapters)


def with_broker(
    models: Sequence[ListedModel], config: ServerConfig
) -> tuple[list[ListedModel], ModelBroker, PlanModel]:
    """The broker of the models' memory, and the models with `max_memory` set to what each reserves there; and a planner
    of models that are added."""
    first = models[0].config
    given = first.cache.max_memory
    total = free_memory() if given is None else parse_bytes(given)
    alive = config.keep_alive or (KEEP_ALIVE if len(models) > 1 or config.models_dir is not None else "-1")
    broker = ModelBroker(total, config.max_loaded_models, seconds_of(alive))

    def plan(own: EngineConfig, num_models: int) -> tuple[EngineConfig, int]:
        needed = min(total, reservation(_file_bytes(own), total, num_models, config.max_loaded_models))
        return replace(own, cache=replace(own.cache, max_memory=needed // config.engines)), needed

    planned = []
    for model in models:
        each, needed = plan(model.config, len(models))
        broker.add_model(model.name, needed)
        planned.append(model if len(models) == 1 else replace(model, config=each))

    def plan_added(path: str, num_others: int) -> tuple[EngineConfig, int]:
        own = _other_config(first, path)
        return plan(replace(own, model=replace(own.model, revision=None)), num_others + 1)

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
