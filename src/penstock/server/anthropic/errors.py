"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`, in one case with `details`."""

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from penstock.server.errors import ErrorReply

OVERLOADED = 529
"""Anthropic's status code for an overloaded server."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


class ErrorDetails(TypedDict):
    error_code: str
    unsupported: list[str]


class ErrorObject(TypedDict):
    type: str
    message: str
    details: NotRequired[ErrorDetails]


class ErrorBody(TypedDict):
    type: Literal["error"]
    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is refused; the message names the field at fault."},
    401: {"model": ErrorBody, "description": "No API key, or an unknown one."},
    404: {"model": ErrorBody, "description": "The model is not served here."},
    429: {"model": ErrorBody, "description": "The key's allowance is used up; `Retry-After` says when."},
    500: {"model": ErrorBody, "description": "The server failed."},
    OVERLOADED: {"model": ErrorBody, "description": "No room now, or no engine; come back later."},
    "default": {"model": ErrorBody, "description": "Any other error."},  # else FastAPI would announce a 422
}


def shape(reply: ErrorReply) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    status = OVERLOADED if reply.status == 503 or reply.code == "overloaded" else reply.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: ErrorObject = {"type": kind, "message": reply.message}
    if reply.param == "thread":  # its client's tool runner then sends the whole conversation with each turn
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return status, {"type": "error", "error": error}
