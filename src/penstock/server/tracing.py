"""OpenTelemetry traces of calls (extra `otel`): a span per call, with child spans for queue, prefill and decode.

W3C trace context is read from the caller's `traceparent` and `tracestate`; the response's `traceparent` names the span.
"""

import time
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from penstock import __version__
from penstock.api.request import RequestOutput

_W3C = TraceContextTextMapPropagator()


class CallTracer:
    """Sends spans to an OTLP/HTTP endpoint, in its own thread."""

    def __init__(self, endpoint: str) -> None:
        """
        Args:
            endpoint: such as http://localhost:4318; spans go to its /v1/traces.
        """
        url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({"service.name": "penstock", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=5)))
        self._tracer: Tracer = self._provider.get_tracer("penstock", __version__)

    def begin_span(self, scope: Scope) -> Span:
        """Start a call's span, as a child of the caller's, if any."""
        context = _W3C.extract(dict(Headers(scope=scope)))
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        name = f"{scope['method']} {scope['path']}"
        return self._tracer.start_span(name, context, SpanKind.SERVER, attributes)

    @staticmethod
    def headers(span: Span) -> dict[str, str]:
        """Trace-context headers that name the span."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span))
        return carrier

    def end_span(self, span: Span, status: int | None, failure: str | None, outputs: Sequence[RequestOutput]) -> None:
        """End a call's span, and add child spans for the engine's work."""
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(Status(StatusCode.ERROR))
        if outputs:
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
                    "gen_ai.usage.output_tokens": sum(_count(output) for output in outputs),
                }
            )
        context = set_span_in_context(span)
        offset = time.time() - time.monotonic()
        for output in outputs:
            for name, begin, end, attributes in _parts(output):
                part = self._tracer.start_span(
                    name, context, attributes=attributes, start_time=_nanoseconds(begin + offset)
                )
                part.end(_nanoseconds(end + offset))
        span.end()

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _parts(output: RequestOutput) -> Iterator[tuple[str, float, float, dict[str, str | int]]]:
    """Queue, prefill and decode of a request, as far as it got: name, begin, end, token counts."""
    times = output.times
    moments = [times.arrival, times.first_scheduled, times.first_token, times.finished]
    tokens = [
        {},
        {"penstock.tokens": len(output.prompt_token_ids), "penstock.cached_tokens": output.num_cached_tokens},
        {"penstock.tokens": _count(output)},
    ]
    for name, begin, end, counts in zip(("queue", "prefill", "decode"), moments, moments[1:], tokens, strict=False):
        if begin is None or end is None:
            return
        yield name, begin, end, {"penstock.request_id": output.request_id, **counts}


def _count(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
