"""Checks before any work is done for a call: its API key, the limits on calls, and its complete body.

RequestId ──> CallLimits: key → concurrent calls → requests a minute → body size, room for bodies, body time ──> routes
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import BodyTimeoutError, BodyTooLargeError, InvalidRequestError, OverloadedError, PenstockError
from penstock.frontend.limits import SharedLimit
from penstock.server.body_route import LARGE_BODY
from penstock.server.call_context import CallContext, context_of, is_public, is_upload
from penstock.server.config import CallLimitsConfig, Takes
from penstock.server.dialects import error_response
from penstock.server.keys import KeyHolder, KeyRing
from penstock.system.host import trim_heaps

RETURN_SECONDS = 1.0
"""Delay after a call with a large body before free memory is returned to the system; also the least interval."""


class HeldBody:
    """Bytes held by one call's body."""

    def __init__(self, limit: SharedLimit, name: str) -> None:
        self._limit = limit
        self._name = name
        self._size = 0
        self.counted = 0

    def grow(self, size: int) -> bool:
        """Count `size` more bytes; False if there is no room."""
        self._size += size
        if self._size < LARGE_BODY:
            return True
        more = self._size - self.counted
        if not self._limit.fits(more, self._name):
            return False
        self._limit.take(more, self._name)
        self.counted = self._size
        return True

    def release(self) -> None:
        self._limit.take(-self.counted, self._name)
        self.counted = self._size = 0


class HeldBodies:
    """The bodies of a server's open calls: limits their total size, not counting small ones.

    After calls with large bodies, free memory is returned to the system.
    """

    def __init__(self, max_bytes: int) -> None:
        self._limit = SharedLimit(max_bytes)
        self._returns_soon = False

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[HeldBody]:
        """A call's body, while the call is open; `name` is that of its API key."""
        held = HeldBody(self._limit, name)
        try:
            yield held
        finally:
            if held.counted:
                held.release()
                self._return_memory_soon()

    def _return_memory_soon(self) -> None:
        if not self._returns_soon:
            self._returns_soon = True
            asyncio.get_running_loop().call_later(RETURN_SECONDS, self._return_memory)

    def _return_memory(self) -> None:
        self._returns_soon = False
        asyncio.get_running_loop().run_in_executor(None, trim_heaps)


_DISCARDED = 16
"""Bytes of a refused body that are read and discarded, in multiples of the largest body, so that its sender reads
the response."""

QUEUE_TIMEOUT = "x-queue-timeout"
_SHOWN = 64
"""Maximum characters of a header repeated in an error."""


class _ClientGone(Exception):
    """The client disconnected before it had sent the whole body: no response is sent."""


class CallLimits:
    """ASGI middleware: enforces the limits, records the caller in the context, and passes bodies on in one piece.

    In any dialect, the header `x-queue-timeout` sets the seconds that a call's requests may wait in the queue.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, limits: CallLimitsConfig, takes: Takes = "text") -> None:
        self._app = app
        self._max_body_bytes = limits.body_bytes(takes)
        self._keys = keys
        self._limits = limits
        self._open = SharedLimit(limits.max_concurrent_requests)
        self._bodies = HeldBodies(limits.max_held_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_public(scope):
            await self._app(scope, receive, send)
            return
        context, headers = context_of(scope), Headers(scope=scope)
        try:
            # Before the body is read: a caller without a key makes no other work.
            holder = self._keys.authenticate(headers)
            _enter_headers(context, holder, headers)
            with (
                self._entered(holder) if scope["method"] == "POST" else contextlib.nullcontext(),
                self._bodies.hold(holder.key.name) as held,
            ):
                context.receive, context.hold_bytes = receive, functools.partial(self._hold, held)
                if not is_upload(scope):
                    body = await self._read_body(scope, receive, held)
                    context.num_body_bytes, context.receive = len(body), _replay(body, receive)
                    # The application has the only reference: it frees a large body as soon as it is parsed.
                    del body
                await self._app(scope, context.receive, send)
        except PenstockError as error:  # only errors of the middleware: the application answers its own
            response = error_response(error, scope["path"], context)
            if isinstance(error, (BodyTooLargeError, BodyTimeoutError)):
                response.headers["connection"] = "close"  # the rest of the body may still arrive
            await response(scope, receive, send)
        except _ClientGone:
            pass  # the client has disconnected: no response can be sent

    @contextlib.contextmanager
    def _entered(self, holder: KeyHolder) -> Iterator[None]:
        name = holder.key.name
        if not self._open.fits(1, name):
            raise OverloadedError(
                f"{self._open.held} requests are open, of {self._open.most} that may be (max_concurrent_requests), and "
                "one API key may not take all"
            )
        holder.enter()
        self._open.take(1, name)
        try:
            yield
        finally:
            self._open.take(-1, name)
            holder.leave()

    def _hold(self, held: HeldBody, size: int) -> None:
        if not held.grow(size):
            raise self._no_room()

    async def _read_body(self, scope: Scope, receive: Receive, held: HeldBody) -> bytes:
        headers = Headers(scope=scope)
        length = int(headers.get("content-length", "0"))  # the HTTP parser has checked that it is a number
        if length > self._max_body_bytes and headers.get("expect", "").lower() == "100-continue":
            raise self._too_large()  # before any of it is sent
        try:
            return await asyncio.wait_for(self._receive_body(length, receive, held), self._limits.body_timeout)
        except asyncio.TimeoutError:
            seconds = self._limits.body_timeout
            raise BodyTimeoutError(f"the body did not arrive within {seconds:g} s (body_timeout)") from None

    async def _receive_body(self, length: int, receive: Receive, held: HeldBody) -> bytes:
        """Receive the body; a refused one is read and discarded."""
        most = self._max_body_bytes
        refusal: PenstockError | None = self._too_large() if length > most else None
        body, size, more = bytearray(), 0, True
        while more and size <= _DISCARDED * most:
            # Under one time limit for the whole body, not one for each piece.
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > most:
                refusal = self._too_large()
            elif refusal is None and not held.grow(len(part)):
                refusal = self._no_room()
            if refusal is None:
                body += part
            else:
                # What was read so far goes at once: a refused body must not hold memory while the rest is discarded.
                body.clear()
                held.release()
        # Only now, after the body: a client that still sends would get a reset instead of the reply.
        if refusal is not None:
            raise refusal
        return bytes(body)

    def _no_room(self) -> OverloadedError:
        return OverloadedError(
            f"the bodies of open calls, with the stored responses that they continue, have no room for this one "
            f"(max_held_body_bytes: {self._limits.max_held_body_bytes}, which one API key may not use up)"
        )

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body is larger than {self._max_body_bytes} bytes (max_body_bytes)")


def _enter_headers(context: CallContext, holder: KeyHolder, headers: Headers) -> None:
    context.key, context.caller, context.limit_headers = holder.key.name, holder.caller, holder.headers
    if (seconds := headers.get(QUEUE_TIMEOUT)) is not None:
        context.queue_timeout = _queue_timeout(seconds)
    context.last_event_id = headers.get("last-event-id")


def _queue_timeout(given: str) -> float:
    try:
        seconds = float(given) if given.isascii() and "_" not in given else 0.0  # not Python's other notations
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        message = f"{QUEUE_TIMEOUT} must be a number of seconds above 0, not {given[:_SHOWN]!r}"
        raise InvalidRequestError(message, QUEUE_TIMEOUT)
    return seconds


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the whole body at once, then what follows: the disconnect."""
    left: bytes | None = body

    async def replay() -> Message:
        nonlocal left
        if left is None:
            return await receive()
        body, left = left, None
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
