"""Bodies that take long to check are checked beside the event loop: nobody else waits for them."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

LARGE_BODY = 65_536
"""Bytes from which on a body is checked in a thread: some milliseconds' work."""


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
            if self.body_field is not None and len(raw) >= LARGE_BODY:
                with contextlib.suppress(ValueError, RecursionError):  # it is no JSON: FastAPI says so
                    request = CheckedRequest(request, raw, await asyncio.to_thread(self._check, raw))
            return await handle(request)

        return handle_large

    def _check(self, raw: bytes) -> object:
        """
        Raises:
            RequestValidationError: it is JSON, and not what the route takes.
        """
        assert self.body_field is not None
        content = json.loads(raw)
        checked, errors = self.body_field.validate(content, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=content)
        return checked
