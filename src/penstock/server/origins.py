"""Calls from web pages (CORS)."""

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ForbiddenOriginError
from penstock.server.call_context import context_of
from penstock.server.dialects import error_response

_LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"
_JSON = re.compile(r"application/([\w.-]+\+)?json\b")
_SHOWN = 100
"""Maximum characters of a header repeated in an error."""


class Origins:
    """ASGI middleware: lets pages of permitted origins call the server, and no others.

    Pages on loopback addresses and the server's own are permitted. A browser lets any page send a body that is not
    declared as JSON without asking first, so such bodies are refused from pages of other origins.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in allowed_origins
        self._allowed = frozenset(allowed_origins)
        self._cors = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_origin_regex=_LOOPBACK,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "origin" not in (headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
        elif self._allows(headers["origin"], headers.get("host", "")):
            await self._cors(scope, receive, send)
        elif scope["method"] in ("GET", "HEAD") or (
            scope["method"] == "POST" and _JSON.match(headers.get("content-type", ""))
        ):
            await self._app(scope, receive, send)  # the browser asked first, or shows the page no answer
        else:
            error = ForbiddenOriginError(
                f"pages of {headers['origin'][:_SHOWN]} may not call this server: start it with --allowed-origins"
            )
            await error_response(error, scope["path"], context_of(scope))(scope, receive, send)

    def _allows(self, origin: str, host: str) -> bool:
        return (
            self._any
            or origin in self._allowed
            or re.fullmatch(_LOOPBACK, origin) is not None
            # The server's own page; a proxy may have changed the scheme.
            or origin.partition("://")[2] == host
        )
