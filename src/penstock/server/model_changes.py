"""For routes that change the served models: checks at the moment of the change, after all waiting, and its record."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from fastapi import Request

from penstock.checkpoint.created import LATEST
from penstock.errors import InvalidRequestError
from penstock.frontend.model_names import ModelNames
from penstock.server.added_models import AddedModels
from penstock.server.listed import NamedModel
from penstock.server.serving import Serving

if TYPE_CHECKING:
    from penstock.server.models import Models


def added_of(request: Request) -> AddedModels:
    """What takes the changes of the server's models."""
    added: AddedModels = request.app.state.added
    return added


def holder_of(request: Request, name: str) -> NamedModel | None:
    """The model that now has this name, with or without the tag of Ollama's clients, or an adapter of it; None: none
    has.
    """
    models: Models | None = request.app.state.models
    for wanted in dict.fromkeys((name, name.removesuffix(LATEST))):
        if models is not None:
            found: NamedModel | None = models.served.find(wanted)
        else:
            serving: Serving = request.app.state.serving
            found = serving if serving.has_name(wanted) else None
        if found is not None:
            return found
    return None


def check_untaken(request: Request, name: str, field: str, *, but: Collection[ModelNames] = ()) -> None:
    """
    Raises:
        InvalidRequestError: now a model, but one of `but`, or an adapter is served by this name; or a model of this
            name was deleted, and is still served by others.
    """
    holder = holder_of(request, name)
    if holder is not None and holder.names not in but:
        raise InvalidRequestError(f"{field}: {name!r} is served here under this name: choose another", field)
    models: Models | None = request.app.state.models
    known = None if models is None else models.served.models.get(name)
    if holder is None and known is not None and known.names not in but:
        raise still_served(name, known.names, field)


def still_served(name: str, names: ModelNames, field: str) -> InvalidRequestError:
    """The error for the name of a model that has others alone."""
    return InvalidRequestError(
        f"{field}: the model that was {name!r} is still served as {names.all[0]!r}: delete that, too, or choose "
        "another name",
        field,
    )


def check_current(request: Request, serving: Serving) -> None:
    """
    Raises:
        InvalidRequestError: the model was replaced or removed since the call began.
    """
    models: Models | None = request.app.state.models
    if models is not None and all(model.engine is not serving.engine for model in models.served.served):
        raise InvalidRequestError(f"the model {serving.names.own!r} was replaced meanwhile: send it again", "model")
