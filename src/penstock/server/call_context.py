"""The context of one HTTP call: everything the server knows about it besides its body.

RequestId ──> AccessLog ──> CallLimits ──> routes: each layer adds what it knows
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from starlette.types import Message, Receive, Scope, Send

from penstock.dataclass import dataclass
from penstock.frontend.limits import ANYONE, Caller
from penstock.frontend.request_stream import RequestStream
from penstock.server.errors import ErrorReply
from penstock.server.pages import DOCS_PATHS
from penstock.server.web_page import WEB_PAGE_PATHS

if TYPE_CHECKING:
    from penstock.frontend.model_loads import ModelUse

_KEY = "call_context"
IGNORED = "penstock-ignored"
"""Header that names the fields of the body without effect."""
_LONGEST_HEADER = 1000
_TOKEN = re.compile(r"[\w.-]+", re.ASCII)
UNKNOWN_FIELD = "unknown"
"""Metrics label of the ignored fields that the documentation does not list: a caller chooses their names."""
PUBLIC_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/ping", "/metrics", "/openapi.json"}
    | DOCS_PATHS
    | WEB_PAGE_PATHS
)


async def _stay_connected() -> Message:
    """The `receive` of a call without a client: it never disconnects."""
    leaves: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await leaves


def _hold_nothing(size: int) -> None:
    """The `hold_bytes` of a call without a connection."""


@dataclass(slots=True)
class CallContext:
    """One HTTP call: its caller, the headers that routes read, and what the access log reports."""

    request_id: str = ""
    """Its `x-request-id`."""
    key: str = ""
    """Name of the API key."""
    caller: Caller = ANYONE
    queue_timeout: float | None = None
    """Seconds that its requests may wait in the queue; None: the server's limit."""
    last_event_id: str | None = None
    """The last event of a broken stream that the client received."""
    num_body_bytes: int = 0
    hold_bytes: Callable[[int], None] = _hold_nothing
    """Counts bytes that the call holds beside its body; raises `OverloadedError` where there is no room."""
    receive: Receive = _stay_connected
    """ASGI's `receive`: after the body, a message when the client disconnects."""
    send_body: Send | None = None
    """ASGI's `send` below all middleware, for the events of a stream that has begun."""
    request_stream: RequestStream | None = None
    ignored: dict[str, str] = field(default_factory=dict)
    """Fields of the body that had no effect, with their metrics labels; the header `penstock-ignored` lists them."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers that the middleware adds to the response, known when the call comes."""
    limit_headers: Callable[[], Mapping[str, str]] = dict
    """The rate limits of its key, as headers."""
    status: int | None = None
    """The response's, once it has begun."""
    failure: str | None = None
    """Why it failed, as a one-word metrics label."""
    model_use: "ModelUse | None" = None
    """Keeps the model loaded until the call ends; None: models stay loaded, or the call uses none."""
    refusal: ErrorReply | None = None
    """The reply that its connection sent while the body was arriving."""

    def end(self) -> None:
        """End the use of the model, and drop the functions of the connection, which refer to this context: a cycle
        would wait for the collector."""
        self.receive, self.send_body = _stay_connected, None
        if self.model_use is not None:
            self.model_use.end()

    def response_headers(self) -> dict[str, str]:
        """All headers that the middleware adds to the response, which begins now."""
        headers = {**self.headers, **self.limit_headers()}
        if self.ignored:
            headers[IGNORED] = self.ignored_header()
        return headers

    def ignored_header(self) -> str:
        """Value of the header that names the ignored fields."""
        names: list[str] = []
        length = 0
        for name in self.ignored:
            length += len(name) + 2
            if length > _LONGEST_HEADER:
                return ", ".join([*names, "..."])
            names.append(name if _TOKEN.fullmatch(name) else ascii(name))
        return ", ".join(names)

    def record_failure(self, reply: ErrorReply) -> None:
        """Record the error with which the call, or its stream, ends."""
        self.failure = reply.reason


def context_of(scope: Scope) -> CallContext:
    """The context of an HTTP call, created on first use: by its connection or by the first middleware."""
    state = scope.setdefault("state", {})
    context: CallContext = state.setdefault(_KEY, CallContext())
    return context


async def _context(request: Request) -> CallContext:
    return context_of(request.scope)


ContextOf = Annotated[CallContext, Depends(_context)]


def is_public(scope: Scope) -> bool:
    """Whether a path needs no API key and no log line: health, metrics, pages and their files."""
    return scope["path"] in PUBLIC_PATHS and scope["method"] in ("GET", "HEAD")


def is_upload(scope: Scope) -> bool:
    """Whether the route reads the body itself, in pieces: a file that is stored."""
    return scope["method"] == "POST" and str(scope["path"]).startswith("/api/blobs/")
