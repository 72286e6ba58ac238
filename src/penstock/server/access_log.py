"""One line in the log for each call, its failure counted, and what the two need to know collected on the way.

RequestId ──> AccessLog ──> CallLimits ──> routes: each notes in the call's `CallRecord` what it learns
"""

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.frontend.client import AsyncEngine
from penstock.frontend.streams import RequestStream
from penstock.request import FinishReason, RequestOutput
from penstock.server.errors import ErrorReply
from penstock.server.logs import FIELDS
from penstock.server.paths import is_open

if TYPE_CHECKING:
    from penstock.server.tracing import CallTracer

logger = logging.getLogger("penstock.access")

_REASONS = {400: "invalid_request", 404: "not_found", 405: "not_found", 422: "invalid_request"}
"""Of faults without a code, by status; of all others it is the server's fault."""
GONE = "client_gone"
REFUSAL = "refusal"
"""In a call's state: the fault that its connection has answered, while its body arrived."""


@dataclass(slots=True)
class CallRecord:
    """What is known of one call."""

    key: str = ""
    """Name of the API key."""
    request_stream: RequestStream | None = None
    failure: str | None = None
    """Why it failed, in a word for metrics."""

    def record_failure(self, reply: ErrorReply) -> None:
        """The call, or its stream, ends with this."""
        self.failure = reason_of(reply)


class AccessLog:
    """ASGI middleware: gives each call its `CallRecord`, as `scope["state"]["record"]`, and logs it at the end."""

    def __init__(
        self, app: ASGIApp, engine: AsyncEngine, *, log_prompts: bool = False, tracer: "CallTracer | None" = None
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._engine = engine
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope.setdefault("state", {})["record"] = CallRecord()
        began = time.monotonic()
        span = None if self._tracer is None or is_open(scope) else self._tracer.begin_span(scope)
        status: int | None = None

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._tracer is not None and span is not None:
                    MutableHeaders(scope=message).update(self._tracer.headers(span))
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            refusal: ErrorReply | None = scope["state"].get(REFUSAL)
            if refusal is not None:
                record.record_failure(refusal)
                status = refusal.status
            outputs = [] if record.request_stream is None else record.request_stream.snapshot()
            if record.failure is None:
                record.failure = _failure_of(status, outputs)
            if record.failure is not None:
                self._engine.metrics.failures.add(1, record.failure)
            self._log(scope, record, status, time.monotonic() - began, outputs)
            if self._tracer is not None and span is not None:
                self._tracer.end_span(span, status, record.failure, outputs)

    def _log(
        self, scope: Scope, record: CallRecord, status: int | None, seconds: float, outputs: list[RequestOutput]
    ) -> None:
        level = logging.DEBUG if is_open(scope) else logging.INFO
        if not logger.isEnabledFor(level):
            return
        facts: dict[str, Any] = {
            "id": scope["state"].get("request_id"),
            "key": record.key or None,
            "status": status,
            "seconds": round(seconds, 4),
            "failure": record.failure,
        }
        if outputs:
            facts |= _facts_of(outputs)
        if outputs and self._log_prompts:
            facts["prompts"] = [self._prompt(output) for output in outputs]
        logger.log(level, "%s %s", scope["method"], scope["path"], extra={FIELDS: facts})

    def _prompt(self, output: RequestOutput) -> str:
        tokenizer = self._engine.tokenizer
        if output.prompt is not None or tokenizer is None:
            return output.prompt or str(list(output.prompt_token_ids))
        return tokenizer.decode(list(output.prompt_token_ids))


def reason_of(reply: ErrorReply) -> str:
    """Why a call failed, in a word for metrics."""
    return reply.code or _REASONS.get(reply.status, "server_error")


def _failure_of(status: int | None, outputs: list[RequestOutput]) -> str | None:
    if status is None or any(one.finish_reason is FinishReason.ABORT for out in outputs for one in out.outputs):
        return GONE
    return None if status < 400 else _REASONS.get(status, "server_error")


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
