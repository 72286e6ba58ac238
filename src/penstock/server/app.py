"""The HTTP application: routes of every dialect over one engine."""

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.responses import Response

from penstock import __version__
from penstock.errors import ConfigError
from penstock.frontend.client import AsyncEngine
from penstock.frontend.model_names import ModelNames
from penstock.frontend.recovery.recent_responses import RecentResponses
from penstock.server import admin, calls, live, request_account
from penstock.server.access_log import AccessLog, HeadRequests, RequestId
from penstock.server.added_models import AddedModels
from penstock.server.call_context import PUBLIC_PATHS
from penstock.server.call_limits import CallLimits
from penstock.server.client_paths import ClientPaths
from penstock.server.config import ServerConfig, Takes
from penstock.server.dialects import add_dialects
from penstock.server.exposition import CONTENT_TYPE, OneOf, PenstockNames, VllmNames, expose, process_collectors
from penstock.server.health import add_health
from penstock.server.keys import KeyRing
from penstock.server.openai import adapters
from penstock.server.origins import Origins
from penstock.server.pages import add_docs
from penstock.server.serving import Serving
from penstock.server.web_page import add_web_page

if TYPE_CHECKING:
    from penstock.frontend.served_models import ServedModels
    from penstock.server.tracing import CallTracer


class _App(FastAPI):
    """FastAPI's application, whose description names the API key, if there are keys."""

    has_keys = False

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            if self.has_keys:
                schema["components"]["securitySchemes"] = {"API key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"API key": []}]
        return super().openapi()


def create_app(
    engine: AsyncEngine,
    config: ServerConfig,
    keys: KeyRing | None = None,
    tracer: "CallTracer | None" = None,
    served: "ServedModels | None" = None,
    added: AddedModels | None = None,
) -> FastAPI:
    """The application of a started engine; without `keys`, there is no authentication.

    Args:
        served: all models, of which the engine is the first; None: it is the only one, and stays loaded.
        added: takes what clients add; None: that ends with the server.
    """
    app = _App(
        title="Penstock",
        version=__version__,
        description="An inference server for large language models.",
        docs_url=None,
        redoc_url=None,
    )
    app.has_keys = bool(keys)
    own, *others = config.served_model_names or [engine.info.model_name]
    names = ModelNames(own, others) if served is None else served.first.names
    own_name = names.own
    recent_responses = engine.recent_responses(config.max_stored_response_bytes)
    app.state.serving, app.state.added = _serving(engine, names, recent_responses, config), added or AddedModels(None)
    app.state.engine, app.state.models = served or engine, None
    if served is not None:
        from penstock.server.models import Models

        app.state.models = Models(served, lambda own, names: _serving(own, names, recent_responses, config))
    app.state.strict_fields = config.strict_fields
    app.state.large_work = app.state.engine.large_work
    app.state.body_timeout, app.state.num_uploads = config.call_limits.body_timeout, 0
    add_dialects(app)
    app.include_router(calls.router)
    app.include_router(request_account.router)
    app.include_router(live.router)
    app.include_router(admin.router)
    app.include_router(adapters.router)
    app.state.admin_without_key = config.admin
    add_health(app, served or engine, own_name)
    add_docs(app)
    add_web_page(app)
    processes = process_collectors(lambda: engine.pids if served is None else served.pids)
    app.add_middleware(HeadRequests)
    app.add_middleware(
        CallLimits,
        keys=keys or KeyRing([]),
        limits=config.call_limits,
        takes="audio" if served is not None else _takes(engine),
    )
    app.add_middleware(Origins, allowed_origins=config.listed_origins)
    app.add_middleware(AccessLog, engine=served or engine, log_prompts=config.log_prompts, tracer=tracer)
    app.add_middleware(RequestId)
    app.add_middleware(ClientPaths, prefix=config.prefix)

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        engines = {own_name: engine} if served is None else served.by_name or {served.first.name: served.main}
        names = [PenstockNames(own.metrics, None if served is None else name) for name, own in engines.items()]
        collectors = [OneOf(names), *processes]
        if config.metrics_names == "vllm":
            every = [VllmNames(own.metrics, name, own.info, own.adapter_use()) for name, own in engines.items()]
            collectors.append(OneOf(every))
        return Response(expose(*collectors), media_type=CONTENT_TYPE)

    _check_prefix(app, config.prefix)
    return app


def _serving(
    engine: AsyncEngine, names: ModelNames, recent_responses: RecentResponses, config: ServerConfig
) -> Serving:
    """
    Raises:
        ConfigError: an adapter has one of the model's names.
    """
    for name in names.all:
        if engine.adapters.find(name) is not None:
            raise ConfigError(f"an adapter cannot have the model's own name, {name!r}")
    engine.metrics.model_info.set(1, names.own)
    return Serving(engine, names, recent_responses, config.resumable_streams)


def _takes(engine: AsyncEngine) -> Takes:
    if engine.sounds is not None or engine.takes_sounds:
        return "audio"
    return "images" if engine.takes_images else "text"


def _check_prefix(app: FastAPI, prefix: str) -> None:
    """
    Raises:
        ConfigError: a path with the prefix could also be one of this server's own without it.
    """
    for path in sorted({*app.openapi()["paths"], *PUBLIC_PATHS}) if prefix else ():
        if f"{path}/".startswith(f"{prefix}/"):
            raise ConfigError(f"root_path {prefix} begins paths of this server itself ({path}): choose another")
