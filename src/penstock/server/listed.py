"""The models of a server as routes list them, loaded or not."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Protocol

from fastapi import Depends, Request

from penstock.api.request import Adapter
from penstock.checkpoint.checkpoint import find_on_disk
from penstock.checkpoint.created import LATEST
from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.fleet.model_broker import ModelStatus
from penstock.frontend.client import AsyncEngine
from penstock.frontend.limits import Caller
from penstock.frontend.model_names import ModelNames
from penstock.server.call_context import ContextOf
from penstock.server.serving import Serving

if TYPE_CHECKING:
    from penstock.frontend.served_model import ServedModel
    from penstock.server.models import Models


class NamedModel(Protocol):
    """A model, loaded or not, whose names and adapters change."""

    names: ModelNames

    @property
    def engine(self) -> AsyncEngine | None: ...

    @property
    def adapters(self) -> Sequence[Adapter]: ...

    def has_name(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""

    def copy_adapter(self, source: str, name: str) -> None:
        """Give an adapter one more name, which nothing has."""

    def remove_adapter(self, name: str) -> Adapter | None:
        """Remove an adapter. Returns it; None if there is none of this name."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One model: its name, and itself once it was loaded."""

    name: str
    path: str
    """Its folder or file, once that is known to be on this machine; else as the options name it."""
    created: int
    serving: Serving | None
    status: ModelStatus
    model: NamedModel
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
        return self.model.has_name(name)


async def list_served(request: Request, context: ContextOf) -> list[Listed]:
    """The models that the caller may use, as they are now."""
    models: Models | None = request.app.state.models
    if models is None:
        serving: Serving = request.app.state.serving
        path = serving.engine.info.model_path
        listed = [Listed(serving.names.own, path, serving.created, serving, ModelStatus(), serving)]
    else:
        now = [  # before any path is awaited, as models may be removed meanwhile
            (model, Listed(model.name, "", models.created, serving, models.served.status(model.name), model))
            for model, serving in models
        ]
        listed = [replace(entry, path=await _path_of(model, entry.serving)) for model, entry in now]
    permitted = (_permitted(model, context.caller) for model in listed)
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


def _permitted(model: Listed, caller: Caller) -> Listed:
    return replace(
        model,
        names=tuple(filter(caller.may_use, model.model.names.all)),
        adapters=tuple(adapter for adapter in model.model.adapters if caller.may_use(adapter.name)),
    )


ListedOf = Annotated[list[Listed], Depends(list_served)]
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
