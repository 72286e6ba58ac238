"""Errors in Ollama's shape: `{"error": ...}`; in a stream, as its last line."""

from typing import Any

from typing_extensions import TypedDict

from penstock.server.errors import MODEL_NOT_PERMITTED, ErrorReply


class ErrorBody(TypedDict):
    error: str


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is refused; the message names the field at fault."},
    401: {"model": ErrorBody, "description": "No API key, or an unknown one."},
    403: {"model": ErrorBody, "description": "The caller may not change what is served."},
    404: {"model": ErrorBody, "description": "The model is not served here."},
    429: {"model": ErrorBody, "description": "No room now, or the key's allowance is used up."},
    500: {"model": ErrorBody, "description": "The server failed."},
    503: {"model": ErrorBody, "description": "The engine is gone, or the server is shutting down."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}


def shape(reply: ErrorReply) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error. Clients know 404 alone for a model that they cannot use."""
    return 404 if reply.code == MODEL_NOT_PERMITTED else reply.status, {"error": reply.message}
