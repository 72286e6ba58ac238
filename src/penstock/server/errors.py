"""Maps exceptions to HTTP statuses and error codes; dialects format these."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.dataclass import dataclass
from penstock.errors import (
    AuthenticationError,
    BodyTimeoutError,
    BodyTooLargeError,
    ClientGoneError,
    EngineDeadError,
    EngineError,
    ForbiddenOriginError,
    InvalidRequestError,
    JournalDamagedError,
    JournalUnavailableError,
    LimitError,
    ModelNotFoundError,
    ModelNotPermittedError,
    NotPermittedError,
    OverloadedError,
    PreviousResponseNotFoundError,
    PromptTooLongError,
    QuarantinedError,
    QueueTimeoutError,
    RateLimitError,
    RequestNotFoundError,
    ResponseNotFoundError,
    ShuttingDownError,
    SlowReaderError,
)

MODEL_NOT_PERMITTED = "model_not_permitted"

_KINDS: dict[type, tuple[int, str | None]] = {
    InvalidRequestError: (400, None),
    PromptTooLongError: (400, "context_length_exceeded"),
    ModelNotFoundError: (404, "model_not_found"),
    RequestNotFoundError: (404, "request_not_found"),
    ResponseNotFoundError: (404, None),
    PreviousResponseNotFoundError: (400, "previous_response_not_found"),
    BodyTooLargeError: (413, "request_too_large"),
    AuthenticationError: (401, "invalid_api_key"),
    NotPermittedError: (403, "operators_only"),
    ModelNotPermittedError: (403, MODEL_NOT_PERMITTED),
    ForbiddenOriginError: (403, "forbidden_origin"),
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
        if isinstance(error.__cause__, RecursionError):
            return ErrorReply(400, "the body is nested too deeply")
        if isinstance(error.__cause__, UnicodeDecodeError):
            return ErrorReply(400, "the body is not UTF-8")
        if isinstance(error.__cause__, ValueError):  # of Python's limit of digits
            return ErrorReply(400, f"the body is not valid JSON: {error.__cause__}")
        return ErrorReply(error.status_code, str(error.detail), headers=error.headers or {})
    kind = next((_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS), None)
    if kind is None:
        return ErrorReply(500, "the server failed on this request; its log has the details")
    param, message = None, str(error)
    if isinstance(error, InvalidRequestError):
        param, message = error.param, f"{error}: {error.over_http}" if error.over_http else message
    headers = {"retry-after": str(math.ceil(error.retry_after))} if isinstance(error, LimitError) else {}
    return ErrorReply(kind[0], message, param, kind[1], headers)


def render_reply(reply: ErrorReply, shape: Shape) -> Response:
    """The HTTP response for an error reply."""
    status, body = shape(reply)
    return Response(msgspec.json.encode(body), status, dict(reply.headers), "application/json")


_REFUSED_FIELD = "refused_field"


def refused_field(name: str, message: str) -> PydanticCustomError:
    """A validator's error for an unknown or unsupported field of its object; `{}` in `message` becomes its path."""
    name = name if name.isprintable() else repr(name)[1:-1]
    return PydanticCustomError(_REFUSED_FIELD, "refused", {"name": name, "message": message})


def _reply_to_bad_body(error: RequestValidationError) -> ErrorReply:
    errors = error.errors()
    first = _most_telling(errors)
    if first["type"] == "json_invalid":
        return ErrorReply(400, f"the body is not valid JSON: {first['ctx']['error']}")
    param = param_of(first["loc"])
    if first["type"] == _REFUSED_FIELD:
        name = first["ctx"]["name"]
        path = f"{param}.{name}" if param else name
        return ErrorReply(400, first["ctx"]["message"].replace("{}", path, 1), path)
    if param is None:
        return ErrorReply(400, "the body must be a JSON object, sent as application/json")
    alternatives = [kind for error in errors if param_of(error["loc"]) == param and (kind := _kind_wanted(error))]
    return ErrorReply(400, f"{param}: {_explain(first, alternatives)}", param)


def _most_telling(errors: Sequence[Any]) -> Any:
    """The first error; for a union, that of the member which matched the value longest."""
    field = errors[0]["loc"][:2]
    return max((error for error in errors if error["loc"][:2] == field), key=_progress)


def _progress(error: Mapping[str, Any]) -> tuple[bool, int, list[int], bool]:
    """How far into a value its validation came before the error; a value of the wrong type came nowhere."""
    location = error["loc"]
    indices = [part for part in location if isinstance(part, int)]
    came_in = error["type"] == "literal_error" or _kind_wanted(error) is None
    return error["type"] in ("too_long", _REFUSED_FIELD), len(location), indices, came_in


def param_of(location: Sequence[int | str]) -> str | None:
    """The field of a validation error, in the caller's notation: `messages[0].content`.

    Pydantic's location also contains the union members that it tried, as types or names of classes; they are omitted.
    """
    path = ""
    for part in location[1:]:
        if part in _KINDS_OF_BODY:
            continue
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS and not part[0].isupper():
            path += f".{part}" if path else part
    return path or None


_KINDS_OF_BODY = frozenset({"generation", "chat", "completion"})
"""The tags of `Invocation`, the only union of bodies."""
_UNION_MEMBERS = frozenset({"str", "int", "float", "bool"})


_TYPES = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""The JSON type that a value should have had, by pydantic's type of error."""


def _kind_wanted(error: Mapping[str, Any]) -> str | None:
    """The kind of value that was expected, for an error that is about the whole value."""
    return str(error["ctx"]["expected"]) if error["type"] == "literal_error" else _TYPES.get(error["type"])


def _explain(error: Mapping[str, Any], alternatives: Sequence[str]) -> str:
    """What is wrong with a value.

    Args:
        alternatives: the kinds of value that any member of a union expected in its place.
    """
    if error["type"] == "missing":
        return "this parameter is required"
    if _kind_wanted(error) is not None:
        return f"must be {' or '.join(dict.fromkeys(alternatives))}"
    if error["type"] == "too_short" and error["ctx"]["min_length"] == 1:
        return "must not be empty"
    if error["type"] == "too_long":
        return f"must have at most {error['ctx']['max_length']} items"
    message = str(error["msg"]).replace("Input should", "must", 1).replace("String should", "must", 1)
    return message[0].lower() + message[1:]


def _encodable(text: str) -> str:
    """The text with unpaired surrogates, which JSON can contain and UTF-8 cannot, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
