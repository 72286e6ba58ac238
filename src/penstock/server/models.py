"""The models of a server by name: which one a call uses."""

from collections.abc import Callable, Iterator

from fastapi import Request

from penstock.errors import ModelNotFoundError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.served_models import ServedModel, ServedModels
from penstock.server.body_route import CheckedRequest
from penstock.server.call_context import CallContext
from penstock.server.disconnect import cancelled_on_disconnect
from penstock.server.serving import ANY_MODEL, Serving, unknown_model

_LISTING = frozenset({"/api/copy", "/api/create", "/api/pull", "/api/show"})
"""Routes with POST that need no loaded model, and know names of models that are not served."""
LATEST = ":latest"
"""The tag that Ollama's clients add to a name."""


class Models:
    """Picks the model of each call, and has it loaded."""

    def __init__(self, served: ServedModels, make_serving: Callable[[AsyncEngine, str], Serving]) -> None:
        """
        Args:
            make_serving: called when a model has been loaded for the first time, with its name.
        """
        self.served = served
        self._make_serving = make_serving
        self._servings: dict[str, Serving] = {}

    def started(self, model: ServedModel) -> Serving | None:
        """The model with its names; None if it was never loaded."""
        if model.name not in self._servings and model.engine is not None:
            self._servings[model.name] = self._make_serving(model.engine, model.name)
        return self._servings.get(model.name)

    def __iter__(self) -> Iterator[tuple[ServedModel, Serving | None]]:
        return ((model, self.started(model)) for model in self.served.models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of this name, or with an adapter of this name; None: the first.

        Raises:
            ModelNotFoundError: there is none.
        """
        if name is None or name in ANY_MODEL:
            return self.served.first
        for wanted in dict.fromkeys((name, name.removesuffix(LATEST))):
            if wanted in self.served.models:
                return self.served.models[wanted]
            for model, serving in self:
                if serving is not None and serving.has_name(wanted):
                    return model
        raise unknown_model(name, list(self.served.models))

    async def serving_of(self, request: Request, context: CallContext) -> Serving:
        """The model that a call names in its body, or else in the query; it is loaded, but not to be listed.

        Raises:
            ClientGoneError: the client has disconnected meanwhile.
            ModelNotFoundError: there is no such model.
            EngineError, LimitError: see `ServedModels.use`.
        """
        is_listing = request.method != "POST" or request.scope["path"] in _LISTING
        try:
            model = self.find(_name_in(request))
        except ModelNotFoundError:
            if not is_listing:
                raise
            model = self.served.first  # the route knows other names, or refuses this one
        serving = self.started(model)
        if serving is None or not is_listing:
            with cancelled_on_disconnect(context.receive):
                context.model_use = await self.served.use(model.name, context.queue_timeout)
        return self.started(model) or self._servings[model.name]


def _name_in(request: Request) -> str | None:
    body = request.checked if isinstance(request, CheckedRequest) else None
    for field in ("source", "model", "name"):  # Ollama's create and copy name a new model beside that which they take
        name = getattr(body, field, None)
        if isinstance(name, str) and name:
            return name
    return request.query_params.get("model")
