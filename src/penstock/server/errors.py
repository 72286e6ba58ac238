"""Maps exceptions to HTTP statuses and error codes; dialects format these."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.errors import (
    AuthenticationError,
    BodyTimeoutError,
    BodyTooLargeError,
    ClientGoneError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    JournalDamagedError,
    JournalUnavailableError,
    LimitError,
    ModelNotFoundError,
    OverloadedError,
    PromptTooLongError,
    QuarantinedError,
    QueueTimeoutError,
    RateLimitError,
    RequestNotFoundError,
    ShuttingDownError,
    SlowReaderError,
)

_KINDS: dict[type, tuple[int, str | None]] = {
    InvalidRequestError: (400, None),
    PromptTooLongError: (400, "context_length_exceeded"),
    ModelNotFoundError: (404, "model_not_found"),
    RequestNotFoundError: (404, "request_not_found"),
    BodyTooLargeError: (413, "request_too_large"),
    AuthenticationError: (401, "invalid_api_key"),
    BodyTimeoutError: (408, "request_timeout"),
    RateLimitError: (429, "rate_limit_exceeded"),
    OverloadedError: (429, "overloaded"),
    QuarantinedError: (400, "request_quarantined"),
    ShuttingDownError: (503, "shutting_down"),
    QueueTimeoutError: (503, "queue_timeout"),
    SlowReaderError: (503, "slow_reader"),
    JournalUnavailableError: (503, "journal_unavailable"),
    EngineError: (500, None),
    ClientGoneError: (499, "client_gone"),  # nginx's status, for logs only: the client has disconnected
    JournalDamagedError: (500, "journal_damaged"),
    EngineDeadError: (503, "engine_unavailable"),
}
"""Status and code by error class; a class not listed inherits those of its base class."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One failed call."""

    status: int
    """HTTP status, unless the dialect has its own."""
    message: str
    param: str | None = None
    """The invalid field, in the caller's notation."""
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why the call failed, as a one-word metrics label."""
        return self.code or reason_of_status(self.status)

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", _encodable(self.message))
        object.__setattr__(self, "param", None if self.param is None else _encodable(self.param))


_REASONS = {400: "invalid_request", 404: "not_found", 405: "not_found", 422: "invalid_request"}


def reason_of_status(status: int) -> str:
    """Why a call failed, as a one-word metrics label, if only the status is known."""
    return _REASONS.get(status, "server_error")


Shape = Callable[[ErrorReply], tuple[int, object]]
"""Formats an error for a dialect: (HTTP status, body)."""


def reply_to_error(error: Exception) -> ErrorReply:
    """The reply to any exception; unexpected ones reveal no details."""
    if isinstance(error, RequestValidationError):
        return _reply_to_bad_body(error)
    if isinstance(error, HTTPException):
        return ErrorReply(error.status_code, str(error.detail), headers=error.headers or {})
    kind = next((_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS), None)
    if kind is None:
        return ErrorReply(500, "the server failed on this request; its log has the details")
    param = error.param if isinstance(error, InvalidRequestError) else None
    headers = {"retry-after": str(math.ceil(error.retry_after))} if isinstance(error, LimitError) else {}
    return ErrorReply(kind[0], str(error), param, kind[1], headers)


def render_reply(reply: ErrorReply, shape: Shape) -> Response:
    """The HTTP response for an error reply."""
    status, body = shape(reply)
    return Response(msgspec.json.encode(body), status, dict(reply.headers), "application/json")


def _reply_to_bad_body(error: RequestValidationError) -> ErrorReply:
    first = _most_telling(error.errors())
    if first["type"] == "json_invalid":
        return ErrorReply(400, f"the body is not valid JSON: {first['ctx']['error']}")
    param = param_of(first["loc"])
    if param is None:
        return ErrorReply(400, "the body must be a JSON object, sent as application/json")
    return ErrorReply(400, f"{param}: {_explain(first)}", param)


def _most_telling(errors: Sequence[Any]) -> Any:
    """The first error; for a union, that of the member which matched the value longest."""
    field = errors[0]["loc"][:2]
    return max((error for error in errors if error["loc"][:2] == field), key=_progress)


def _progress(error: Mapping[str, Any]) -> tuple[bool, int, list[int]]:
    """How far into a value its validation came before the error."""
    location = error["loc"]
    return error["type"] == "too_long", len(location), [part for part in location if isinstance(part, int)]


def param_of(location: Sequence[int | str]) -> str | None:
    """The field of a validation error, in the caller's notation: `messages[0].content`.

    Pydantic's location also contains the union members that it tried; they are omitted.
    """
    path = ""
    for part in location[1:]:
        if part in _KINDS_OF_BODY:
            continue
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path or None


_KINDS_OF_BODY = frozenset({"generation", "chat", "completion"})
"""The tags of `Invocation`, the only union of bodies."""
_UNION_MEMBERS = frozenset({"str", "int", "float", "bool"})


def _explain(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "this parameter is required"
    message = str(error["msg"])
    return message[0].lower() + message[1:]


def _encodable(text: str) -> str:
    """The text with unpaired surrogates, which JSON can contain and UTF-8 cannot, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
