"""Traces, sent to a collector that only listens."""

import gzip
import itertools
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.running import running_server
from tests.support import fetch

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector():
    """Its address, and the spans it got."""
    spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    thread.join()
    server.server_close()


def attributes_of(span):
    return {attribute.key: attribute.value.int_value or attribute.value.string_value for attribute in span.attributes}


def test_a_call_is_traced_within_its_callers_trace_with_queue_prefill_and_decode(tiny_llama, collector):
    endpoint, spans = collector
    with running_server("--model", str(tiny_llama), "--threads", "1", "--otlp-endpoint", endpoint) as server:
        body = {"model": server.model, "prompt": [5] * 7, "max_tokens": 3, "ignore_eos": True}
        answer = fetch.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": PARENT}, timeout=60)
        assert answer.status_code == 200
        assert fetch.post(f"{server.url}/v1/completions", json=body | {"model": "none"}).status_code == 404
        fetch.get(f"{server.url}/health")
    calls = [span for span in spans if span.name == "POST /v1/completions"]
    assert len(calls) == 2
    call = next(span for span in calls if span.trace_id.hex() in PARENT)
    assert call.parent_span_id.hex() in PARENT
    assert answer.headers["traceparent"].split("-")[1:3] == [call.trace_id.hex(), call.span_id.hex()]
    told = attributes_of(call)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (7, 3)
    parts = [span for span in spans if span.parent_span_id == call.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    assert [attributes_of(span).get("penstock.tokens") for span in parts] == [None, 7, 3]
    assert call.start_time_unix_nano <= parts[0].start_time_unix_nano + 2_000_000
    for before, after in itertools.pairwise(parts):
        assert before.end_time_unix_nano == pytest.approx(after.start_time_unix_nano, abs=2000)
    failed = next(span for span in calls if span is not call)
    assert attributes_of(failed)["error.type"] == "model_not_found"
    assert len(spans) == 5
