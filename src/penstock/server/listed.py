"""The models of a server as routes list them, loaded or not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from penstock.api.request import Adapter
from penstock.checkpoint.checkpoint import find_on_disk
from penstock.checkpoint.created import LATEST
from penstock.errors import ConfigError
from penstock.fleet.model_broker import ModelStatus
from penstock.frontend.limits import Caller
from penstock.server.call_context import ContextOf
from penstock.server.serving import Serving

if TYPE_CHECKING:
    from penstock.frontend.served_model import ServedModel
    from penstock.server.models import Models


@dataclass(frozen=True, slots=True)
class Listed:
    """One model: its name, and itself once it was loaded."""

    name: str
    path: str
    """Its folder or file, once that is known to be on this machine; else as the options name it."""
    created: int
    serving: Serving | None
    status: ModelStatus
    names: tuple[str, ...] = ()
    """Its names that the caller may use."""
    adapters: tuple[Adapter, ...] = ()
    """Its adapters that the caller may use."""

    @property
    def shown_name(self) -> str | None:
        """Its first name that the caller may use; None: only adapters of it."""
        return next(iter(self.names), None)

    def has_name(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""
        return name == self.name or (self.serving is not None and self.serving.has_name(name))


async def _listed(request: Request, context: ContextOf) -> list[Listed]:
    models: Models | None = request.app.state.models
    if models is None:
        serving: Serving = request.app.state.serving
        path = serving.engine.info.model_path
        listed = [Listed(serving.model_names[0], path, serving.created, serving, ModelStatus())]
    else:
        now = [  # before any path is awaited, as models may be removed meanwhile
            (model, Listed(model.name, "", models.created, serving, models.served.status(model.name)))
            for model, serving in models
        ]
        listed = [replace(entry, path=await _path_of(model, entry.serving)) for model, entry in now]
    permitted = (_with_names(model, context.caller) for model in listed)
    return [model for model in permitted if model.names or model.adapters]


async def _path_of(model: "ServedModel", serving: Serving | None) -> str:
    if serving is not None:
        return serving.engine.info.model_path
    given = model.config.model
    try:
        path = await asyncio.to_thread(find_on_disk, given.model, given.revision)
    except ConfigError:  # its load says so
        path = None
    return str(path or given.model or "")


def _with_names(model: Listed, caller: Caller) -> Listed:
    names = (model.name,) if model.serving is None else model.serving.model_names
    adapters = () if model.serving is None else model.serving.engine.adapters
    return replace(
        model,
        names=tuple(filter(caller.may_use, names)),
        adapters=tuple(adapter for adapter in adapters if caller.may_use(adapter.name)),
    )


ListedOf = Annotated[list[Listed], Depends(_listed)]
"""The models that the caller may use."""


def find_listed(listed: Sequence[Listed], name: str | None) -> Listed | None:
    """The model of this name, with or without the tag that Ollama's clients add, or with an adapter of this name; None
    if there is none. Without a name: the first.
    """
    if name is None:
        return next(iter(listed), None)
    for wanted in dict.fromkeys((name, name.removesuffix(LATEST))):
        for model in listed:
            if model.has_name(wanted):
                return model
    return None
