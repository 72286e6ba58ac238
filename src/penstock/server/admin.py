"""`/v1/admin`: engines are added, drained and replaced while the server serves. For operators only."""

from fastapi import APIRouter, Request
from typing_extensions import TypedDict

from penstock.config.engine_config import Role
from penstock.errors import ConfigError, InvalidRequestError, NotPermittedError
from penstock.fleet.fleet import State
from penstock.server.body import Body
from penstock.server.body_route import BodyRoute
from penstock.server.call_context import ContextOf
from penstock.server.dialect import ServingOf
from penstock.server.openai_errors import ERRORS

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


@router.get("/engines")
async def list_engines(request: Request, context: ContextOf, serving: ServingOf) -> Engines:
    """List the engines: number, state, process, model, and number of requests."""
    check_operator(request, context)
    return _engines(serving)


@router.post("/engines")
async def add_engine(request: Request, context: ContextOf, serving: ServingOf) -> Engines:
    """Start one more engine like the oldest one. Answers when it is up."""
    check_operator(request, context)
    try:
        await serving.engine.fleet.grow()
    except ConfigError as error:
        raise InvalidRequestError(f"the engine cannot be started: {error}") from error
    return _engines(serving)


@router.delete("/engines/{place}")
async def drain_engine(place: int, request: Request, context: ContextOf, serving: ServingOf) -> Engines:
    """Drain an engine: its requests move to other engines or finish, then it ends, and the call is answered."""
    check_operator(request, context)
    await serving.engine.fleet.retire(place)
    return _engines(serving)


@router.post("/reload")
async def reload(body: ModelChoice, request: Request, context: ContextOf, serving: ServingOf) -> Engines:
    """Replace each engine by a new one, one after another, without losing a request. Answers when all are replaced."""
    check_operator(request, context)
    try:
        await serving.engine.fleet.reload(body.model, body.revision)
    except ConfigError as error:
        raise InvalidRequestError(f"the new engine cannot be started: {error}", "model") from error
    return _engines(serving)


def check_operator(request: Request, context: ContextOf) -> None:
    """
    Raises:
        NotPermittedError: the caller may not change what is served.
    """
    if not context.caller.operator:
        raise NotPermittedError("changing engines and adapters needs an operator's API key")
    if not context.key and not request.app.state.admin_without_key:
        raise NotPermittedError("changing engines and adapters needs --admin or an operator's API key")


def _engines(serving: ServingOf) -> Engines:
    fleet = serving.engine.fleet
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
        for state in fleet.states()
    ]
    return {"engines": engines, "queued": fleet.dispatcher.num_queued, "reloading": fleet.is_reloading}
