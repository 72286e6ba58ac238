"""Server-sent events, and noticing that the client has gone.

Framing as in the HTML standard, section 9.2: an event is `data: <one line>`, perhaps after
`event: <name>`, ended by an empty line. JSON written
without line breaks is one line.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"

EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "description": "Where it is streamed: one event of many. `data` is JSON, but for a last `[DONE]`.",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}
"""What a stream is, for the OpenAPI description of a route's answers."""

_encode = msgspec.json.Encoder().encode


def event(data: object, name: str | None = None) -> bytes:
    """One event that carries an object as JSON, with the name of its kind if it has one."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + _encode(data) + b"\n\n"


@contextlib.contextmanager
def on_disconnect(receive: Receive, abort: Callable[[], None]) -> Iterator[None]:
    """Call `abort` as soon as the client goes away while the block runs. The request's body must have been read."""
    watch = asyncio.ensure_future(_wait_for_disconnect(receive, abort))
    try:
        yield
    finally:
        watch.cancel()


async def _wait_for_disconnect(receive: Receive, abort: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    abort()


class EventStream(Response):
    """Sends events as they come and ends when `events` does. `abort`, called when the client leaves, must end them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], abort: Callable[[], None], headers: Mapping[str, str]) -> None:
        # X-Accel-Buffering: without it, nginx would hold the events back.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._abort = abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with on_disconnect(receive, self._abort):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for events in self._events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._abort()
