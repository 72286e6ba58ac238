"""Parses and validates JSON bodies of all routes.

A large body is parsed and validated in a thread, to keep the event loop free. JSON is accepted with any content type;
the middleware `Origins` keeps other sites' pages from exploiting that.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Coroutine
from decimal import Decimal
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.responses import Response

from penstock.api.sampling_params import RoundedNumber
from penstock.errors import InvalidRequestError
from penstock.frontend.large_work import LargeWork
from penstock.server.body import Body, check_all_text, may_hold_half_a_pair, mend_conversation
from penstock.server.call_context import UNKNOWN_FIELD, context_of
from penstock.server.disconnect import cancelled_on_disconnect

LARGE_BODY = 65_536
"""Bytes from which a body is validated in a thread, as it takes milliseconds."""
MAX_CONTAINERS = 32_768
"""Maximum lists and objects in a body. Parsing and validating each takes up to 5 us, in which no other thread runs, and
hundreds of bytes."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_LONG_NUMBER = re.compile(rb"\d[\d.]{15}")
"""Numbers with more digits than a double may represent; integers are exact in Python."""
_PIECE = 2**20
"""Bytes that are searched for such a number at a time: no other thread runs meanwhile, and images have megabytes."""


class CheckedRequest(Request):
    """A request whose body is JSON; once validated, the JSON is the validated object."""

    def __init__(self, request: Request, raw: bytes, checked: object = None) -> None:
        scope = dict(request.scope)
        headers = MutableHeaders(scope=scope)
        headers["content-type"] = "application/json"
        super().__init__(scope, request.receive)
        self._raw = raw
        self.checked = checked

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return json.loads(self._raw) if self.checked is None else self.checked


class BodyRoute(APIRoute):
    """A route that validates its body before FastAPI does, and records which of its fields have no effect.

    Raises:
        ClientGoneError: the client has disconnected while its large body waited to be validated.
        InvalidRequestError: a string outside of the conversation is not valid Unicode, or a field is unknown and the
            server refuses those (`--strict-fields`).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_body(request: Request) -> Response:
            raw, checked = await request.body(), None
            with contextlib.suppress(ValueError, RecursionError):  # not JSON: FastAPI reports it
                if len(raw) >= LARGE_BODY:
                    work: LargeWork = request.app.state.large_work
                    with cancelled_on_disconnect(request.receive):
                        checked = await work.run(
                            len(raw), lambda: self._check(raw), context_of(request.scope).caller.tenant
                        )
                else:
                    checked = self._check(raw)
            if isinstance(checked, Body):
                record_ignored(checked, request)
            return await handle(CheckedRequest(request, raw, checked))

        return handle_body

    def _check(self, raw: bytes) -> object:
        """
        Raises:
            InvalidRequestError: it has too many lists and objects, or a string outside of its conversation is not valid
                Unicode.
            RequestValidationError: it is JSON, but does not match the route's schema.
        """
        assert self.body_field is not None
        _check_containers(raw)
        has_long_number = _LONG_NUMBER.search(raw) if len(raw) <= _PIECE else _has_long_number(raw)
        content = json.loads(raw, parse_float=_number) if has_long_number else json.loads(raw)
        # A search of the bytes: walking through every body for so rare a thing would take longer than to parse it.
        if may_hold_half_a_pair(raw):
            mend_conversation(content)
            check_all_text(content)
        # FastAPI's own field, so that its errors and the schema of its documentation are the same.
        checked, errors = self.body_field.validate(content, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=content)
        return checked


def _check_containers(raw: bytes) -> None:
    """
    Raises:
        InvalidRequestError: the body has too many lists and objects.
    """
    if _num_brackets(raw) > MAX_CONTAINERS and (number := _num_brackets(_STRING.sub(b"", raw))) > MAX_CONTAINERS:
        raise InvalidRequestError(
            f"the body has {number} lists and objects; at most {MAX_CONTAINERS} are taken: send it as several calls"
        )


def _num_brackets(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


def _has_long_number(raw: bytes) -> bool:
    """Whether there may be one: a false alarm costs time alone."""
    overlap = 15
    return any(_LONG_NUMBER.search(raw, at, at + _PIECE + overlap) for at in range(0, len(raw), _PIECE))


def record_ignored(body: Body, request: Request) -> None:
    """Record which of a body's fields have no effect.

    Raises:
        InvalidRequestError: a field is unknown, and the server refuses those (`--strict-fields`).
    """
    ignored = body.ignored_fields()
    if ignored.unknown and getattr(request.app.state, "strict_fields", False):
        name = next(iter(ignored.unknown))
        raise InvalidRequestError(f"unknown parameter {name!r}, which this server refuses (--strict-fields)", name)
    context = context_of(request.scope)
    context.ignored.update((name, name) for name in ignored.hints)
    context.ignored.update((name, UNKNOWN_FIELD) for name in ignored.unknown)


def _number(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value) or Decimal(literal) == Decimal(repr(value)):
        return value
    rounded = RoundedNumber(value)
    rounded.literal = literal
    return rounded
