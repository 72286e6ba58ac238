"""Errors in TGI's shape: `{"error", "error_type"}`."""

from typing import Any

from typing_extensions import TypedDict

from penstock.server.errors import ErrorReply

REFUSED, FAILED = 422, 424
"""TGI's status codes for a request that fails validation, and for a failed generation."""

INCOMPLETE = "incomplete_generation"
"""The type of the error that ends a stream which has begun to answer."""

_STATUSES = {400: REFUSED, 500: FAILED}
_TYPES = {FAILED: "generation", 429: "overloaded", 503: "overloaded"}


class ErrorBody(TypedDict):
    error: str
    error_type: str


ERRORS: dict[int | str, dict[str, Any]] = {
    REFUSED: {"model": ErrorBody, "description": "The request is refused; the message names the field at fault."},
    FAILED: {"model": ErrorBody, "description": "The generation failed."},
    429: {"model": ErrorBody, "description": "No room now; come back later."},
    503: {"model": ErrorBody, "description": "The engine is gone, or the server is shutting down."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}


def shape(reply: ErrorReply) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    status = _STATUSES.get(reply.status, reply.status)
    return status, {"error": reply.message, "error_type": _TYPES.get(status, "validation")}
