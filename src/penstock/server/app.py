"""The HTTP application: routes of every dialect over one engine."""

from typing import Literal

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from penstock import __version__
from penstock.engine.client import AsyncEngine
from penstock.server.config import ServerConfig
from penstock.server.dialect import Serving
from penstock.server.dialects import add_dialects
from penstock.server.edge import Edge
from penstock.server.exposition import CONTENT_TYPE, expose


class Health(TypedDict):
    status: Literal["ok", "unhealthy"]
    reason: str | None


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application of a started engine."""
    app = FastAPI(title="Penstock", version=__version__, description="Large language models: requests in, tokens out.")
    app.state.serving = Serving(engine, config.served_model_name or engine.info.model_name)
    add_dialects(app)
    app.add_middleware(Edge)

    @app.get("/health", tags=["operation"], response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        """Whether the engine makes progress: 503 if it is dead, stuck or silent."""
        reason = await engine.check_health(config.step_deadline)
        body: Health = {"status": "ok" if reason is None else "unhealthy", "reason": reason}
        return JSONResponse(body, 200 if reason is None else 503)

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        return Response(expose(engine.metrics), media_type=CONTENT_TYPE)

    return app
