"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

from typing_extensions import TypedDict

from penstock.server.errors import ErrorReply
from penstock.server.streams import EVENTS

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is refused; `param` names the field at fault."},
    401: {"model": ErrorBody, "description": "No API key, or an unknown one."},
    404: {"model": ErrorBody, "description": "The model is not served here."},
    429: {
        "model": ErrorBody,
        "description": "No room now, or the key's allowance is used up; `Retry-After` says when.",
    },
    500: {"model": ErrorBody, "description": "The server failed."},
    503: {"model": ErrorBody, "description": "The engine is gone, or the server is shutting down."},
    "default": {"model": ErrorBody, "description": "Any other error."},  # else FastAPI would announce a 422
}


def answers_or_errors(model: Any) -> dict[int | str, dict[str, Any]]:
    """Answers of a route, for its OpenAPI description: a JSON object, or events if it is streamed, or an error."""
    return {200: {"model": model, "content": EVENTS}, **ERRORS}


def shape(reply: ErrorReply) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    kind = _TYPES.get(reply.status, "invalid_request_error" if reply.status < 500 else "server_error")
    return reply.status, {
        "error": {"message": reply.message, "type": kind, "param": reply.param, "code": reply.code},
    }
