"""Health checks: progress, whether an outside restart is needed, and readiness for requests."""

from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typing_extensions import NotRequired, TypedDict

from penstock.fleet.fleet import ReplicaState, State
from penstock.frontend.client import AsyncEngine
from penstock.server.ollama.names import is_ollama_client
from penstock.server.pages import encoder_page, wants_page
from penstock.server.web_page import web_page

if TYPE_CHECKING:
    from penstock.frontend.served_models import ServedModels

RETRY_AFTER = "2"
"""Seconds, about the time it takes to replace an engine."""


Status = Literal["ok", "restarting", "draining", "unhealthy"]


class EngineHealth(TypedDict):
    place: int
    state: State
    reason: str | None


class Health(TypedDict):
    """A health answer; `error` and `error_type` are TGI's fields for "unhealthy"."""

    status: Status
    reason: str | None
    engines: NotRequired[list[EngineHealth]]
    """Present if there are several engines."""
    error: NotRequired[Literal["unhealthy"]]
    error_type: NotRequired[Literal["healthcheck"]]


_BAD: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not now; `reason` says why."}}


def add_health(app: FastAPI, engine: "AsyncEngine | ServedModels", model_name: str) -> None:
    """Add the routes. None reports "ok" while all engines are dead or stuck."""

    def answer(status: Status, reason: str | None = None, code: int | None = None) -> Response:
        return _answer(status, reason, code, engine.states())

    @app.get("/", tags=["TGI"], response_model=Health, responses=_BAD)
    async def home(request: Request) -> Response:
        """As `/health`, but a page for a browser, and to Ollama's clients the text by which they know its server."""
        problem = await engine.health_error()
        if problem is None and is_ollama_client(request.headers):
            return PlainTextResponse("Ollama is running")
        if wants_page(request.headers):
            page = web_page if engine.info.encoder is None else encoder_page
            return page(request, model_name, problem)
        return answer("unhealthy", problem) if problem else answer("ok")

    @app.get("/ping", tags=["TGI"], response_model=Health, responses=_BAD)  # SageMaker's name for it
    @app.get("/health", tags=["operation"], response_model=Health, responses=_BAD)
    async def health() -> Response:
        """Whether the engine, of several one at least, makes progress: 503 while it is dead, being replaced, stuck or
        silent."""
        problem = await engine.health_error()
        return answer("unhealthy", problem) if problem else answer("ok")

    @app.get("/health/live", tags=["operation"], response_model=Health, responses=_BAD)
    async def live() -> Response:
        """Whether the server can help itself: also while it replaces its engine, but not once it has given that up."""
        problem = await engine.health_error()
        if problem and engine.restarting:
            return answer("restarting", problem, 200)
        return answer("unhealthy", problem) if problem else answer("ok")

    @app.get("/health/ready", tags=["operation"], response_model=Health, responses=_BAD)
    async def ready() -> Response:
        """Whether requests are taken and served: not while the engine is dead or stuck, while the server drains, nor
        while the journal cannot be written."""
        problem = await engine.health_error() or engine.journal_error
        if problem:
            return answer("unhealthy", problem)
        return answer("draining", str(engine.refusal)) if engine.refusal else answer("ok")


def _answer(status: Status, reason: str | None, code: int | None, states: list[ReplicaState]) -> Response:
    body: Health = {"status": status, "reason": reason}
    if len(states) > 1:
        body["engines"] = [{"place": state.replica, "state": state.state, "reason": state.reason} for state in states]
    if status == "unhealthy":
        body["error"], body["error_type"] = "unhealthy", "healthcheck"
    code = code or (200 if status == "ok" else 503)
    return JSONResponse(body, code, {} if code == 200 else {"retry-after": RETRY_AFTER})
