"""The models of a server as routes list them, loaded or not."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from penstock.fleet.model_broker import ModelStatus
from penstock.server.serving import Serving

if TYPE_CHECKING:
    from penstock.server.models import Models


@dataclass(frozen=True, slots=True)
class Listed:
    """One model: its name, and itself once it was loaded."""

    name: str
    path: str
    created: int
    serving: Serving | None
    status: ModelStatus


async def _listed(request: Request) -> list[Listed]:
    models: Models | None = request.app.state.models
    if models is None:
        serving: Serving = request.app.state.serving
        info = serving.engine.info
        return [Listed(serving.model_names[0], info.model_path, serving.created, serving, ModelStatus())]
    created, listed = request.app.state.serving.created, []
    for model, model_serving in models:
        path = model.config.model.model if model_serving is None else model_serving.engine.info.model_path
        status = models.served.status(model.name)
        listed.append(Listed(model.name, path or "", created, model_serving, status))
    return listed


ListedOf = Annotated[list[Listed], Depends(_listed)]
