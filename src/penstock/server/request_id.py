"""What every answer has in common, whatever route or dialect: an id, and never a bare failure."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.call_context import context_of
from penstock.server.dialects import error_response

logger = logging.getLogger("penstock.server")

REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """ASGI middleware: puts `x-request-id`, the caller's or a new one, on each answer, and answers what escapes.

    The same id goes by `request-id`, the name that Anthropic's clients read.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        context_of(scope).request_id = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            if started:
                raise
            await error_response(error, scope["path"])(scope, receive, send_with_id)
