"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    PenstockError,
    PromptTooLongError,
)

logger = logging.getLogger("penstock.server")


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


def error_body(error: Exception) -> ErrorBody:
    """The error object of an exception, whichever it is."""
    if isinstance(error, InvalidRequestError):
        return _body(str(error), "invalid_request_error", error.param, _code(error))
    if isinstance(error, EngineError):
        return _body(str(error), "server_error", None, _code(error))
    return _body("the server failed on this request; its log has the details", "server_error", None, None)


def error_response(error: Exception) -> Response:
    """The HTTP answer to an exception, whichever it is."""
    return _respond(status_of(error), error_body(error))


def status_of(error: Exception) -> int:
    """The HTTP status of an exception."""
    if isinstance(error, ModelNotFoundError):
        return 404
    if isinstance(error, InvalidRequestError):
        return 400
    return 503 if isinstance(error, EngineDeadError) else 500


def add_error_handlers(app: FastAPI) -> None:
    """Give every error that a route can raise its answer."""
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_penstock_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_response(InvalidRequestError(f"the body is not valid JSON: {first['ctx']['error']}"))
    param = param_of(first["loc"])
    if param is None:
        return error_response(InvalidRequestError("the body must be a JSON object, sent as application/json"))
    return error_response(InvalidRequestError(f"{param}: {_explain(first)}", param))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path}; /docs lists what there is",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = messages.get(error.status_code, str(error.detail))
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return _respond(error.status_code, _body(message, kind, None, None), error.headers)


def param_of(location: Sequence[int | str]) -> str | None:
    """The field that a validation error speaks of, as a caller would write it: `messages[0].content`.

    Pydantic's location also names the members of unions that it tried; they follow the field and are left out.
    """
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
        else:
            break
    return path or None


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool"})


def _explain(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "this parameter is required"
    message = str(error["msg"])
    return message[0].lower() + message[1:]


_CODES: dict[type[PenstockError], str] = {
    PromptTooLongError: "context_length_exceeded",
    ModelNotFoundError: "model_not_found",
    EngineDeadError: "engine_unavailable",
}


def _code(error: PenstockError) -> str | None:
    return _CODES.get(type(error))


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    shown = None if param is None else _encodable(param)
    return {"error": {"message": _encodable(message), "type": kind, "param": shown, "code": code}}


def _encodable(text: str) -> str:
    """The text with halves of surrogate pairs, which JSON can carry and UTF-8 cannot, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _respond(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")
