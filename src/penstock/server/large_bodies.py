"""Bodies of JSON hold text and nothing else; large ones are checked beside the event loop, so that nobody waits."""

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
from starlette.responses import Response

from penstock.frontend.large_work import LargeWork
from penstock.sampling_params import RoundedNumber
from penstock.server.body import check_all_text, may_hold_half_a_pair

LARGE_BODY = 65_536
"""Bytes from which on a body is checked in a thread: some milliseconds' work."""
_LONG_NUMBER = re.compile(rb"\d[\d.]{15}")
"""Numbers with more digits than a double may hold; integers are exact in Python."""


class CheckedRequest(Request):
    """A request whose body has been checked already: its JSON is what came of that."""

    def __init__(self, request: Request, raw: bytes, checked: object) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._checked = checked

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._checked


class LargeBodyRoute(APIRoute):
    """Gives FastAPI small bodies to check; large ones it checks in a thread, with the same outcome."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_large(request: Request) -> Response:
            raw = await request.body()
            if self.body_field is None:
                return await handle(request)
            with contextlib.suppress(ValueError, RecursionError):  # it is no JSON: FastAPI says so
                if len(raw) >= LARGE_BODY:
                    work: LargeWork = request.app.state.large_work
                    request = CheckedRequest(request, raw, await work.run(len(raw), lambda: self._check(raw)))
                elif _LONG_NUMBER.search(raw):
                    request = CheckedRequest(request, raw, self._check(raw))
                elif may_hold_half_a_pair(raw):
                    check_all_text(json.loads(raw))
            return await handle(request)

        return handle_large

    def _check(self, raw: bytes) -> object:
        """
        Raises:
            InvalidRequestError: a text in it is none.
            RequestValidationError: it is JSON, and not what the route takes.
        """
        assert self.body_field is not None
        content = json.loads(raw, parse_float=_number)
        if may_hold_half_a_pair(raw):
            check_all_text(content)
        checked, errors = self.body_field.validate(content, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=content)
        return checked


def _number(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value) or Decimal(literal) == Decimal(repr(value)):
        return value
    rounded = RoundedNumber(value)
    rounded.literal = literal
    return rounded
