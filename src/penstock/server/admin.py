"""`/v1/admin`: engines are added, drained and replaced while the server serves. For operators only."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Request
from typing_extensions import TypedDict

from penstock.config.engine_config import Role
from penstock.errors import ConfigError, InvalidRequestError, NotPermittedError
from penstock.fleet.fleet import Fleet, State
from penstock.fleet.model_broker import FIXED_ENGINES
from penstock.server.body import Body
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.dialect import ServingOf
from penstock.server.openai_errors import ERRORS

if TYPE_CHECKING:
    from penstock.server.models import Models

router = APIRouter(
    prefix="/v1/admin", tags=["operation"], responses={"default": ERRORS["default"]}, route_class=BodyRoute
)


class EngineAccount(TypedDict):
    place: int
    state: State
    reason: str | None
    node: str
    """The cluster node that it runs on; empty for the server's own machine."""
    pid: int
    model: str
    arithmetic: str
    role: Role
    requests: int


class Engines(TypedDict):
    engines: list[EngineAccount]
    queued: int
    reloading: bool


class ModelChoice(Body):
    model: str | None = None
    """Model that the new engines load; default: the old engines' model, read from disk again."""
    revision: str | None = None
    """Branch, tag or commit of the model's hub repository; default: the old engines' or, of another model, main."""


async def _fleet(request: Request, context: ContextOf) -> AsyncIterator[Fleet]:
    """The engines of the model that the query names as `model`, which stays loaded meanwhile; default: the first."""
    check_operator(request, context)
    models: Models | None = request.app.state.models
    if models is None:
        yield request.app.state.serving.engine.fleet
        return
    use = await models.served.use(models.find(request.query_params.get("model")).name, context.queue_timeout)
    try:
        yield use.engine.fleet
    finally:
        use.end()


FleetOf = Annotated[Fleet, Depends(_fleet)]


@router.get("/engines")
async def list_engines(request: Request, context: ContextOf, serving: ServingOf) -> Engines:
    """List the engines: number, state, process, model, and number of requests; of all models, if there are several."""
    check_operator(request, context)
    models: Models | None = request.app.state.models
    fleets = [serving.engine.fleet] if models is None else [engine.fleet for engine in models.served.engines]
    return _engines(*fleets)


@router.post("/engines")
async def add_engine(request: Request, fleet: FleetOf) -> Engines:
    """Start one more engine like the oldest one. Answers when it is up. Not with several models."""
    if request.app.state.models is not None:
        raise InvalidRequestError(FIXED_ENGINES)
    try:
        await fleet.grow()
    except ConfigError as error:
        raise InvalidRequestError(f"the engine cannot be started: {error}") from error
    return _engines(fleet)


@router.delete("/engines/{place}")
async def drain_engine(place: int, fleet: FleetOf) -> Engines:
    """Drain an engine: its requests move to other engines or finish, then it ends, and the call is answered."""
    await fleet.retire(place)
    return _engines(fleet)


@router.post("/reload")
async def reload(body: ModelChoice, fleet: FleetOf) -> Engines:
    """Replace each engine by a new one, one after another, without losing a request. Answers when all are replaced."""
    try:
        await fleet.reload(body.model, body.revision)
    except ConfigError as error:
        raise InvalidRequestError(f"the new engine cannot be started: {error}", "model") from error
    return _engines(fleet)


def check_operator(request: Request, context: ContextOf) -> None:
    """
    Raises:
        NotPermittedError: the caller may not change what is served.
    """
    if not context.caller.operator:
        raise NotPermittedError("changing engines and adapters needs an operator's API key")
    if not context.key and not request.app.state.admin_without_key:
        raise NotPermittedError("changing engines and adapters needs --admin or an operator's API key")


def _engines(*fleets: Fleet) -> Engines:
    engines: list[EngineAccount] = [
        {
            "place": state.replica,
            "state": state.state,
            "reason": state.reason,
            "node": state.node,
            "pid": state.pid,
            "model": state.model,
            "arithmetic": state.arithmetic,
            "role": state.role,
            "requests": state.num_requests,
        }
        for fleet in fleets
        for state in fleet.states()
    ]
    queued = sum(fleet.dispatcher.num_queued for fleet in fleets)
    return {"engines": engines, "queued": queued, "reloading": any(fleet.is_reloading for fleet in fleets)}
