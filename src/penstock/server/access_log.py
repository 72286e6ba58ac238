"""Middleware for all routes: request ids, responses to uncaught exceptions, HEAD, the access log."""

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.request import FinishReason, RequestOutput
from penstock.frontend.client import AsyncEngine
from penstock.server.call_context import CallContext, context_of, is_public
from penstock.server.dialects import error_response
from penstock.server.errors import reason_of_status, reply_to_error
from penstock.server.logs import FIELDS
from penstock.system.host import bracketed

if TYPE_CHECKING:
    from penstock.frontend.served_models import ServedModels
    from penstock.server.tracing import CallTracer
    from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger("penstock.server")
access_logger = logging.getLogger("penstock.access")

GONE = "client_gone"
REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """ASGI middleware: gives calls their ids and responses the headers of all middleware; answers uncaught exceptions.

    The id, `x-request-id`, is the caller's or a new one; `request-id`, which Anthropic's clients read, repeats it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Printable and short, as it comes back in a header and in the log.
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        context = context_of(scope)
        context.request_id, context.send_body = request_id, send
        context.headers = {REQUEST_ID: request_id, "request-id": request_id}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                MutableHeaders(scope=message).update(context.response_headers())
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            logger.exception("request %s failed", request_id)
            # The response has begun, so no error can be sent: only the connection can end.
            if context.status is not None:
                raise
            await error_response(error, scope["path"])(scope, receive, send_with_headers)
        finally:
            context.end()


class HeadRequests:
    """ASGI middleware: answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class AccessLog:
    """ASGI middleware: logs each call at its end, from its `CallContext`."""

    def __init__(
        self,
        app: ASGIApp,
        engine: "AsyncEngine | ServedModels",
        *,
        log_prompts: bool = False,
        tracer: "CallTracer | None" = None,
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._engine = engine
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        began = time.monotonic()
        span = None if self._tracer is None or is_public(scope) else self._tracer.begin_span(scope)
        if self._tracer is not None and span is not None:
            context.headers.update(self._tracer.headers(span))
        status: int | None = None
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # `RequestId` answers it
            reply = reply_to_error(error)
            context.failure, status = context.failure or reply.reason, reply.status
            raise
        finally:
            status = context.status or status
            if context.refusal is not None:
                context.record_failure(context.refusal)
                status = context.refusal.status
            # At the end of the call, so that an aborted answer is logged with what it had.
            outputs = [] if context.request_stream is None else context.request_stream.snapshot()
            if context.failure is None:
                context.failure = _failure_of(status, outputs)
            engine = self._engine if context.model_use is None else context.model_use.engine
            if context.failure is not None:
                engine.record_failure(context.failure)
            for label in context.ignored.values():
                engine.record_ignored_field(label)
            self._log(scope, context, status, time.monotonic() - began, outputs, engine)
            if self._tracer is not None and span is not None:
                self._tracer.end_span(span, status, context.failure, outputs)

    def _log(
        self,
        scope: Scope,
        context: CallContext,
        status: int | None,
        seconds: float,
        outputs: list[RequestOutput],
        engine: "AsyncEngine | ServedModels",
    ) -> None:
        level = logging.DEBUG if is_public(scope) else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        facts: dict[str, Any] = {
            "id": context.request_id,
            "client": _client_of(scope),
            "key": context.key or None,
            "status": status,
            "seconds": round(seconds, 4),
            "failure": context.failure,
        }
        if outputs:
            facts |= _facts_of(outputs)
        if outputs and self._log_prompts:
            facts["prompts"] = [_prompt(output, engine.tokenizer) for output in outputs]
        access_logger.log(level, "%s %s", scope["method"], scope["path"], extra={FIELDS: facts})


def _prompt(output: RequestOutput, tokenizer: "Tokenizer | None") -> str:
    if output.prompt is not None or tokenizer is None:
        return output.prompt or str(list(output.prompt_token_ids))
    return tokenizer.decode(list(output.prompt_token_ids))


def _client_of(scope: Scope) -> str | None:
    """Address and port of the connection's peer or, behind a proxy on this machine, the client that the proxy names."""
    client = scope.get("client")
    if client is None:
        return None
    return f"{bracketed(client[0])}:{client[1]}" if client[1] else str(client[0])


def _failure_of(status: int | None, outputs: list[RequestOutput]) -> str | None:
    if status is None or any(
        answer.finish_reason is FinishReason.ABORT for output in outputs for answer in output.outputs
    ):
        return GONE
    return None if status < 400 else reason_of_status(status)


def _facts_of(outputs: list[RequestOutput]) -> dict[str, Any]:
    answers = [answer for output in outputs for answer in output.outputs]
    scheduled = [o.times.first_scheduled - o.times.arrival for o in outputs if o.times.first_scheduled is not None]
    first = [o.times.first_token - o.times.arrival for o in outputs if o.times.first_token is not None]
    return {
        "request": outputs[0].request_id,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "answer_tokens": sum(len(answer.token_ids) for answer in answers),
        "queue_seconds": round(max(scheduled), 4) if scheduled else None,
        "first_token_seconds": round(min(first), 4) if first else None,
        "finish": ",".join(sorted({str(answer.finish_reason) for answer in answers if answer.finish_reason})) or None,
    }
