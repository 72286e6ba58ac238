"""The server's dialects, and the dialect of each path."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from penstock.errors import PenstockError
from penstock.server import huggingface_errors as tgi_errors
from penstock.server import openai_errors
from penstock.server.anthropic import errors as anthropic_errors
from penstock.server.anthropic import routes as anthropic_routes
from penstock.server.call_context import CallContext, context_of
from penstock.server.cohere import routes as cohere_routes
from penstock.server.errors import ErrorReply, Shape, render_reply, reply_to_error
from penstock.server.ollama import blobs as ollama_blobs
from penstock.server.ollama import creation as ollama_creation
from penstock.server.ollama import errors as ollama_errors
from penstock.server.ollama import library as ollama_library
from penstock.server.ollama import pull as ollama_pull
from penstock.server.ollama import routes as ollama_routes
from penstock.server.openai import audio as openai_audio
from penstock.server.openai import encoding as openai_encoding
from penstock.server.openai import responses as openai_responses
from penstock.server.openai import routes as openai_routes
from penstock.server.tei import routes as tei_routes
from penstock.server.tgi import routes as tgi_routes

_SHAPES_BELOW: dict[str, Shape] = {
    anthropic_routes.router.prefix: anthropic_errors.shape,
    ollama_routes.router.prefix: ollama_errors.shape,
}
"""Dialects that have all paths below one."""
_SHAPES: dict[str, Shape] = {
    **{route.path: cohere_routes.shape for route in cohere_routes.router.routes if isinstance(route, APIRoute)},
    **{
        route.path: tgi_errors.shape
        for route in (*tgi_routes.router.routes, *tei_routes.router.routes)
        if isinstance(route, APIRoute)
    },
}
"""Other dialects than these and OpenAI's, by path."""


def add_dialects(app: FastAPI) -> None:
    """Add every dialect's routes to the application, and a handler for every error that a route can raise."""
    openai = (openai_routes, openai_responses, openai_encoding, openai_audio)
    ollama = (ollama_routes, ollama_library, ollama_creation, ollama_pull, ollama_blobs)
    for routes in (*openai, anthropic_routes, cohere_routes, *ollama, tei_routes, tgi_routes):
        app.include_router(routes.router)
    for kind in (PenstockError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)


def shape_of(path: str) -> Shape:
    """The error format at a path: OpenAI's, unless the path belongs to another dialect."""
    below = (shape for beginning, shape in _SHAPES_BELOW.items() if f"{path}/".startswith(f"{beginning}/"))
    return next(below, None) or _SHAPES.get(path, openai_errors.shape)


def error_response(error: Exception, path: str, context: CallContext | None = None) -> Response:
    """The HTTP response to an exception at a path; recorded in the call's context, if there is one."""
    reply = reply_to_error(error)
    if context is not None:
        context.record_failure(reply)
    return render_reply(reply, shape_of(path))


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    reply = reply_to_error(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        if reply.status == 404:
            docs = f"{request.scope.get('root_path', '')}/docs"
            reply = ErrorReply(404, f"unknown route {path}; see {docs}", headers=reply.headers)
        else:
            allowed = _methods_at(request)
            reply = ErrorReply(405, f"{path} accepts {allowed}, not {request.method}", headers={"allow": allowed})
    context_of(request.scope).record_failure(reply)
    return render_reply(reply, shape_of(path))


def _methods_at(request: Request) -> str:
    """Methods of all routes at a path, for `Allow`."""
    calls = ({**request.scope, "method": method} for method in ("DELETE", "GET", "PATCH", "POST", "PUT"))
    taken = (call for call in calls if any(route.matches(call)[0] is Match.FULL for route in request.app.routes))
    return ", ".join(call["method"] if call["method"] != "GET" else "GET, HEAD" for call in taken)
