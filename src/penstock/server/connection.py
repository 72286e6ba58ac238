"""One HTTP connection: uvicorn's h11 protocol, with limits on the size and duration of a client's messages.

    idle ──first byte──> head ──complete──> call ──answered──> rest of its body ──read──> idle
     the longest idle       size, count,      chunks             time
     are closed first       time

A violated limit is answered once, in the dialect of the path if it is known, and closes the connection.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Literal, cast

import h11
import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.server.access_log import REQUEST_ID
from penstock.server.call_context import context_of
from penstock.server.client_paths import usual_path, without_prefix
from penstock.server.config import CallLimitsConfig
from penstock.server.dialects import shape_of
from penstock.server.errors import ErrorReply

logger = logging.getLogger("penstock.server")

MAX_TARGET = 8192
"""Maximum bytes of a request target (path and query); RFC 9110 recommends at least 8,000."""
FREE_CHUNKS = 4096
MIN_CHUNK = 64
"""A chunked body may have `FREE_CHUNKS` chunks plus one per `MIN_CHUNK` bytes, as h11 takes some 8 µs per chunk."""
LINGER_SECONDS = 1.0
"""Time for which a refused client's data is read and dropped: a reset could keep it from reading the response."""
_PIECE = 16_384
"""Bytes parsed at a time; a head may exceed its limit by this many before it is refused."""

_CODES = {
    408: "request_timeout",
    414: "uri_too_long",
    431: "headers_too_large",
    501: "unsupported_transfer_encoding",
    503: "overloaded",
    505: "unsupported_http_version",
}


class _Beyond(h11.RemoteProtocolError):
    """A request that is valid HTTP but exceeds a limit."""


class BoundedConnection(h11.Connection):
    """h11's connection, which also refuses requests above the limits. `reply` is the error reply."""

    def __init__(self, limits: CallLimitsConfig) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._num_chunks = self._num_body_bytes = 0
        self._sends_chunks = False  # whether the current response is in chunks
        self.reply: ErrorReply | None = None
        self.is_head_request = False
        self.path = ""

    def send(self, event: Any) -> Any:
        if isinstance(event, h11.Data) and self._sends_chunks:
            # The state stays as it is, and h11 takes a tenth of a streamed token's time to find that out.
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        output = super().send(event)
        if isinstance(event, h11.Response):
            self._sends_chunks = output is not None and b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        return output

    @property
    def num_unparsed(self) -> int:
        """Bytes received but not yet parsed."""
        return len(self._receive_buffer)

    def next_event(self) -> Any:
        in_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.reply = self._reply_to(error, in_head)
            raise
        return event

    def _check(self, event: object) -> None:
        """
        Raises:
            h11.RemoteProtocolError: with this event, the request exceeds a limit.
        """
        if isinstance(event, h11.Request):
            self._check_request(event)
        elif isinstance(event, h11.Data):
            self._num_body_bytes += len(event.data)
            # Tiny chunks are cheap to send and expensive to parse.
            self._num_chunks += event.chunk_start
            if self._num_chunks > FREE_CHUNKS + self._num_body_bytes // MIN_CHUNK:
                raise _Beyond(f"the body comes in chunks of less than {MIN_CHUNK} bytes")
        elif isinstance(event, h11.EndOfMessage):
            self._check_fields(event.headers, 0, "trailer")

    def _check_request(self, request: h11.Request) -> None:
        self._num_chunks = self._num_body_bytes = 0
        self.is_head_request = request.method == b"HEAD"
        self.path = request.target.partition(b"?")[0].decode("ascii")
        if request.http_version not in (b"1.0", b"1.1"):
            raise _Beyond("only HTTP/1.0 and HTTP/1.1 are supported", error_status_hint=505)
        if len(request.target) > MAX_TARGET:
            raise _Beyond(_LONG_TARGET, error_status_hint=414)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            # A proxy that uses the other header sees another request follow (RFC 9112, 6.3).
            raise _Beyond("a request has either Content-Length or Transfer-Encoding, not both")
        self._check_fields(request.headers, len(request.method) + len(request.target), "head")

    def _check_fields(self, headers: Sequence[tuple[bytes, bytes]], size: int, where: str) -> None:
        most, largest = self._limits.max_headers, self._limits.max_header_bytes
        if len(headers) > most:
            message = f"the {where} has {len(headers)} header fields; at most {most} (max_headers)"
            raise _Beyond(message, error_status_hint=431)
        size += sum(len(name) + len(value) + 4 for name, value in headers)
        if size > largest:
            raise _Beyond(f"the {where} has {size} bytes; at most {largest} (max_header_bytes)", error_status_hint=431)

    def _reply_to(self, error: h11.RemoteProtocolError, in_head: bool) -> ErrorReply:
        status, message = error.error_status_hint, str(error)
        if status == 431 and not isinstance(error, _Beyond):  # from h11, for an incomplete head or trailer
            where = "head" if in_head else "trailer, or a chunk's extension,"
            message = f"the {where} has more than {self._limits.max_header_bytes} bytes (max_header_bytes)"
            # Without the end of its first line, it is the target that is too long.
            if in_head and b"\n" not in bytes(self._receive_buffer):
                status, message = 414, _LONG_TARGET
        elif not isinstance(error, _Beyond):
            message = message.partition(": bytearray")[0]  # h11 repeats what it cannot parse
            message = f"the request is not valid HTTP/1.1: {message}"
        return ErrorReply(status, message, code=_CODES.get(status))


_LONG_TARGET = f"the request target has more than {MAX_TARGET} bytes"


class _Flow(FlowControl):
    """Flow control that keeps reading during a call, to detect a disconnect, but limits pipelined data."""

    def __init__(self, transport: asyncio.Transport, reads_ahead: Callable[[], bool | None]) -> None:
        """
        Args:
            reads_ahead: whether more data may be read during a call; returns None outside of a call.
        """
        super().__init__(transport)
        self._reads_ahead = reads_ahead

    def pause_reading(self) -> None:
        # During a call reading goes on: only so is the end of the connection seen.
        if not self._reads_ahead():
            super().pause_reading()

    def resume_reading(self) -> None:
        if self._reads_ahead() is not False:
            super().resume_reading()


Owed = Literal["head", "body"]


class BoundedProtocol(H11Protocol):
    """The protocol of a connection, with two timers: `owed` for the rest of a head or body, `stall` for a client that
    does not read its answer.
    """

    def __init__(
        self,
        limits: CallLimitsConfig,
        idle: "dict[BoundedProtocol, None]",
        refused: Callable[[ErrorReply], None],
        prefix: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            idle: connections without a call, shared by all of the server's; the longest idle first.
            refused: called with each error reply that is sent before a call exists.
            prefix: prefix of paths that a proxy may not strip.
        """
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._idle = idle
        self._on_refusal = refused
        self._prefix = prefix
        self._parser = self.conn = BoundedConnection(limits)
        self._owed: Owed | None = None
        self._owed_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._refused = False

    # ── called by asyncio ────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self._reads_ahead)
        self._watch()
        # After it was accepted: an idle connection may make room for it.
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        # In pieces, so that a head is refused soon after it exceeds its limit.
        for start in range(0, len(data), _PIECE):
            if self._refused:
                return
            super().data_received(data[start : start + _PIECE])

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._stop_timers()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._limits.write_timeout, self._end_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    # ── called by uvicorn ────────────────────────────────────────────────────────────────────────────────────────────

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._watch()

    def send_400_response(self, msg: str) -> None:
        assert self._parser.reply is not None, "uvicorn refuses what the parser refused"
        self._refuse(self._parser.reply)

    def _should_upgrade(self) -> bool:
        """Always False: `Upgrade` is ignored, as RFC 9110 section 7.8 allows."""
        return False

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _reads_ahead(self) -> bool | None:
        if self._refused or self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            return None
        return self._parser.num_unparsed <= self._limits.max_header_bytes

    def _watch(self) -> None:
        """Start `body_timeout` when the server begins to wait for the rest of a head or body; stop it on arrival."""
        if self._refused:
            return
        if self._is_idle:
            self._idle.setdefault(self)
        else:
            self._idle.pop(self, None)
        owed = self._what_is_owed()
        if owed == self._owed:
            return
        self._owed = owed
        if self._owed_timer is not None:
            self._owed_timer.cancel()
        if owed is not None:
            self._unset_keepalive_if_required()
            self._owed_timer = self.loop.call_later(self._limits.body_timeout, self._end_overdue)

    def _what_is_owed(self) -> Owed | None:
        """The part of the message to wait for: a begun or first head, or the body of a request already answered."""
        if self.conn.their_state is h11.IDLE:
            return "head" if self.cycle is None or self._parser.num_unparsed else None
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        return "body" if answered else None

    def _end_overdue(self) -> None:
        if self._owed == "head" and self._parser.num_unparsed:
            seconds = self._limits.body_timeout
            message = f"the head did not arrive within {seconds:g} s (body_timeout)"
            self._refuse(ErrorReply(408, message, code=_CODES[408]))
        else:
            self.transport.abort()

    def _end_stalled(self) -> None:
        seconds = self._limits.write_timeout
        logger.warning("a client read nothing of its answer for %g s: its connection is closed", seconds)
        self.transport.abort()  # closing would wait until the client has read the buffer

    def _make_room(self) -> None:
        longest_idle = next(iter(self._idle))
        if longest_idle is self:
            message = f"{self._limits.max_connections} connections with calls are open (max_connections)"
            self._refuse(ErrorReply(503, message, code=_CODES[503], headers={"retry-after": "1"}))
        else:
            self._idle.pop(longest_idle)
            # Not `close`, which would wait for a client that reads nothing.
            longest_idle.transport.abort()

    def _refuse(self, reply: ErrorReply) -> None:
        """Send the reply, unless a response has begun already, and close the connection."""
        self._refused = True
        self._idle.setdefault(self)
        self._stop_timers()
        if self._is_idle:
            self._on_refusal(reply)
        else:
            self._take_call_back(reply)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(b"".join(self._answer(reply)))
        if not self._end_writing():
            self.transport.close()
            return
        self.flow.resume_reading()
        # Closed at once, the client's unread bytes would reset the connection, and with it the reply on its way.
        self._owed_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _end_writing(self) -> bool:
        """Half-close the connection; False if that is impossible: over TLS, or because the client has left."""
        if not self.transport.can_write_eof():
            return False
        try:
            self.transport.write_eof()
        except OSError:  # ENOTCONN: asyncio has not been told yet
            return False
        return True

    def _take_call_back(self, reply: ErrorReply) -> None:
        """Cancel a request with an invalid body in its application, which sees a disconnect."""
        context_of(cast(Scope, self.cycle.scope)).refusal = reply
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def _answer(self, reply: ErrorReply) -> Iterator[bytes]:
        status, body = shape_of(usual_path(without_prefix(self._parser.path, self._prefix)))(reply)
        content, request_id = msgspec.json.encode(body), uuid.uuid4().hex
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
            (REQUEST_ID, request_id),
            ("request-id", request_id),
            *reply.headers.items(),
        ]
        yield self.conn.send(h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase))
        if not self._parser.is_head_request:
            yield self.conn.send(h11.Data(data=content))
        yield self.conn.send(h11.EndOfMessage())

    def _stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        for timer in (self._owed_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()


def protocol_within(
    limits: CallLimitsConfig, refused: Callable[[ErrorReply], None], prefix: str = ""
) -> type[asyncio.Protocol]:
    """The protocol for the connections of one server."""
    idle: dict[BoundedProtocol, None] = {}

    class ProtocolWithinLimits(BoundedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(limits, idle, refused, prefix, *args, **kwargs)

    return ProtocolWithinLimits
