"""The models of a server by name: which one a call uses."""

import time
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

from fastapi import Request

from penstock.checkpoint.created import LATEST
from penstock.errors import ModelNotFoundError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.limits import ANYONE, Caller
from penstock.frontend.model_names import ModelNames
from penstock.frontend.served_model import ServedModel
from penstock.frontend.served_models import ServedModels
from penstock.server.body_route import CheckedRequest
from penstock.server.call_context import CallContext
from penstock.server.disconnect import cancelled_on_disconnect
from penstock.server.serving import ANY_MODEL, Serving, unknown_model

_LISTING = frozenset({"/api/create"})
"""Routes with POST that need no loaded model, and know names of models that are not served."""


class Models:
    """Picks the model of each call, and has it loaded."""

    def __init__(self, served: ServedModels, make_serving: Callable[[AsyncEngine, ModelNames], Serving]) -> None:
        """
        Args:
            make_serving: called when a model has been loaded for the first time, with its names.
        """
        self.served = served
        self.created = int(time.time())
        self.num_pulls = 0
        """Downloads of models under way."""
        self._make_serving = make_serving
        self._servings: WeakKeyDictionary[ServedModel, Serving] = WeakKeyDictionary()

    def started(self, model: ServedModel) -> Serving | None:
        """The model with its names; None if it was never loaded."""
        if model not in self._servings and model.engine is not None:
            self._servings[model] = self._make_serving(model.engine, model.names)
        return self._servings.get(model)

    def __iter__(self) -> Iterator[tuple[ServedModel, Serving | None]]:
        return ((model, self.started(model)) for model in self.served.served)

    def find(self, name: str | None, caller: Caller = ANYONE) -> ServedModel:
        """The model of this name, or with an adapter of this name; None: the first that the caller may use, or else of
        which it may use an adapter.

        Raises:
            ModelNotFoundError: there is none.
            ModelNotPermittedError: the caller may not use it.
        """
        if name is None or name in ANY_MODEL:
            return self.served.first if caller.models is None else self._first_for(caller)
        caller.check_model(name)
        for wanted in dict.fromkeys((name, name.removesuffix(LATEST))):
            if (model := self.served.find(wanted)) is not None:
                return model
        known = (next(filter(caller.may_use, model.names.all), None) for model in self.served.served)
        raise unknown_model(name, [own for own in known if own is not None])

    def _first_for(self, caller: Caller) -> ServedModel:
        served = self.served.served
        caller.check_any(name for model in served for name in model.all_names)
        usable = [model for model in served if caller.may_use(model.name)]
        usable += [model for model in served if any(map(caller.may_use, model.all_names))]
        return usable[0]

    async def serving_of(self, request: Request, context: CallContext) -> Serving:
        """The model that a call names in its body, or else in the query; it is loaded, but not to be listed.

        Raises:
            ClientGoneError: the client has disconnected meanwhile.
            ModelNotFoundError: there is no such model.
            ModelNotPermittedError: the caller may not use it.
            EngineError, LimitError: see `ServedModels.use`.
        """
        is_listing = request.method != "POST" or request.scope["path"] in _LISTING
        try:
            model = self.find(_name_in(request), context.caller)
        except ModelNotFoundError:
            if not is_listing:
                raise
            model = self.served.first  # the route knows other names, or refuses this one
        serving = self.started(model)
        if serving is None or not is_listing:
            with cancelled_on_disconnect(context.receive):
                context.model_use = await self.served.use(model.name, context.queue_timeout)
            model = context.model_use.model  # another may have taken its place meanwhile
            serving = self.started(model)
            assert serving is not None, "it is used"
        return serving


def _name_in(request: Request) -> str | None:
    body = request.checked if isinstance(request, CheckedRequest) else None
    for field in ("source", "model", "name"):  # Ollama's create names a new model beside that which it takes
        name = getattr(body, field, None)
        if isinstance(name, str) and name:
            return name
    return request.query_params.get("model")
