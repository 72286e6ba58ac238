"""Streamed answers: their frames, the `Answer` that formats their events, and the response that sends them.

RequestStream ──deltas──> Answer ──events in its frame──> EventStream ──> client
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.request import FinishReason, RequestOutput
from penstock.errors import PenstockError
from penstock.frontend.output_processor import CompletionDelta
from penstock.frontend.recovery.stream_cursor import StreamCursor
from penstock.frontend.request_stream import RequestStream
from penstock.server.call_context import CallContext
from penstock.server.disconnect import on_disconnect
from penstock.server.errors import ErrorReply, reply_to_error

logger = logging.getLogger("penstock.server")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""A comment, which clients skip."""
SILENCE_SECONDS = 10.0
"""Seconds without an event after which a keep-alive is sent. Proxies close silent connections after 50 to 60 s."""

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
"""OpenAPI description of a stream of events, for a route's responses."""
JSON_LINES: dict[str, Any] = {
    "application/x-ndjson": {"schema": {"type": "string", "description": "Where it is streamed: lines of JSON."}}
}
"""The same for a stream of JSON lines."""


class Frame(Enum):
    """How the events of a stream are framed; the value is the stream's media type."""

    SERVER_SENT_EVENTS = "text/event-stream"
    """By the HTML standard, section 9.2: an event is `data: <one line>`, possibly after `event: <name>`, and ends with
    an empty line."""
    JSON_LINES = "application/x-ndjson"
    """An event is a line of JSON. It has no id, so the stream cannot be resumed."""


encode = msgspec.json.Encoder().encode


def event(data: object, name: str | None = None) -> bytes:
    """One event with an object as JSON, and the name of its type, if any."""
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + encode(data) + b"\n\n"


def json_line(data: object) -> bytes:
    """One event of a stream of JSON lines."""
    return encode(data) + b"\n"


class EventStream(Response):
    """Sends events as they come and ends when `events` does. `abort`, called on a disconnect, must end them."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        frame: Frame,
        abort: Callable[[], None],
        headers: Mapping[str, str],
        send_body: Send | None = None,
    ) -> None:
        """
        Args:
            send_body: sends events past the middleware, which has nothing to do for them; None: with what begins it.
        """
        # X-Accel-Buffering: without it, nginx would hold the events back.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(headers=headers, media_type=frame.value)
        del self.headers["content-length"]
        self._events = events
        self._abort = abort
        self._send_body = send_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with on_disconnect(receive, self._abort):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                # A task: an event resumes it alone, and not all the coroutines of middleware and routes around it.
                await asyncio.ensure_future(self._send_events(self._send_body or send))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._abort()

    async def _send_events(self, send_body: Send) -> None:
        async for events in self._events:
            await send_body({"type": "http.response.body", "body": events, "more_body": True})


class Answer(Protocol):
    """Formats one call's outputs in a dialect.

    `position` is the index of a prompt in the call. Failed answers do not reach it: they are errors of the call. Nor do
    aborted ones, unless a stream has sent a part: the stream then ends with the dialect's event for that.
    """

    frame: Frame
    """How its events are framed where it is streamed."""

    def begin_stream(self) -> bytes:
        """Events that open a stream, before any token."""

    def stream_delta(self, position: int, delta: CompletionDelta) -> bytes:
        """Events for a delta; empty if it shows nothing."""

    def end_stream(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Events that close a stream."""

    def keep_alive(self) -> bytes:
        """An event or comment without content, for a stream that has been silent."""

    def fail_stream(self, reply: ErrorReply) -> bytes:
        """The event that ends a stream after a failure."""

    def complete_body(self, outputs: Sequence[RequestOutput]) -> object:
        """The body of a response that is not streamed, as JSON."""

    def headers(self, outputs: Sequence[RequestOutput] | None) -> Mapping[str, str]:
        """Dialect-specific headers; `outputs` is None at the beginning of a stream."""


class _KeepAlive:
    """Wakes the reader of a stream whenever nothing was sent for `SILENCE_SECONDS`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._timer = self._loop.call_later(SILENCE_SECONDS, self._tick)
        self._last_sent = self._loop.time()

    def sent(self) -> None:
        """Record that data is sent now."""
        self._last_sent = self._loop.time()

    def _tick(self) -> None:
        # one timer per interval, not one per token
        left = self._last_sent + SILENCE_SECONDS - self._loop.time()
        if left <= 0:
            self._wake()
        self._timer = self._loop.call_later(left if left > 0 else SILENCE_SECONDS, self._tick)

    def stop(self) -> None:
        self._timer.cancel()


async def stream_answer(
    request_stream: RequestStream,
    answer: Answer,
    cursor: StreamCursor | None,
    context: CallContext,
    failure_of: Callable[[CompletionDelta], PenstockError | None],
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[bytes]:
    """Events of the stream; deltas that arrived together form one chunk. A failure becomes the last event."""
    pieces: list[bytes] = []
    keep_alive = _KeepAlive(request_stream.wake)
    has_begun = cursor is not None and cursor.resumes
    try:
        begin = answer.begin_stream()
        if begin and not (cursor and cursor.resumes):
            yield begin
        async for deltas in request_stream:
            for position, delta in deltas:
                if delta.finish_reason is not None and (failure := failure_of(delta)):
                    if not has_begun or delta.finish_reason is not FinishReason.ABORT:
                        raise failure
                    context.record_failure(reply_to_error(failure))
                piece = answer.stream_delta(position, delta)
                has_begun = has_begun or bool(piece)
                pieces.append(cursor.mark(position, delta, piece) if cursor else piece)
            if events := b"".join(pieces) if deltas else answer.keep_alive():
                keep_alive.sent()
                yield events
            pieces.clear()
        end = answer.end_stream(request_stream.snapshot())
        if before_end is not None:
            await before_end()
        if end:
            yield end
    except Exception as error:
        if not isinstance(error, PenstockError):
            logger.exception("a stream failed")
        reply = reply_to_error(error)
        context.record_failure(reply)
        yield b"".join([*pieces, answer.fail_stream(reply)])
    finally:
        keep_alive.stop()
