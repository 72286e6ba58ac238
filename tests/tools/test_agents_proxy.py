"""The recording proxy passes requests and answers on as they are, and keeps both."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from tests.support import fetch
from tools.agents_proxy import RecordingProxy


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with what it was sent, in chunks, or refuses."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400 if self.path == "/refused" else 200)
        self.send_header("transfer-encoding", "chunked")
        self.send_header("x-connection", self.headers["connection"])
        self.end_headers()
        for piece in (content[:5], content[5:]):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_requests_and_answers_pass_unchanged_and_are_kept(upstream: str) -> None:
    body = {"model": "m", "text": "größer ☕"}
    with RecordingProxy(upstream) as proxy:
        headers = {"authorization": "Bearer secret", "anthropic-version": "2023-06-01"}
        assert fetch.post(f"{proxy.url}/v1/x?beta=true", json=body, headers=headers).json() == body
        assert fetch.post(f"{proxy.url}/refused", content=b"no JSON").status_code == 400
    kept, refused = proxy.exchanges
    assert (kept.method, kept.path, kept.status, kept.body) == ("POST", "/v1/x?beta=true", 200, body)
    assert json.loads(kept.answer) == body
    assert kept.headers["anthropic-version"] == "2023-06-01"
    assert "secret" not in str(kept.headers)
    assert (str(refused), refused.body, refused.answer) == ("POST /refused 400", "no JSON", "no JSON")


def test_bodies_in_chunks_are_passed_on_whole(upstream: str) -> None:
    with RecordingProxy(upstream) as proxy:
        answer = fetch.post(f"{proxy.url}/x", content=iter([b'{"model"', b': "m"}']))
        assert answer.json() == {"model": "m"}
    assert proxy.exchanges[0].body == {"model": "m"}


def test_dropped_fields_do_not_reach_the_server_but_are_kept(upstream: str) -> None:
    with RecordingProxy(upstream, dropped=["metadata"]) as proxy:
        assert fetch.post(f"{proxy.url}/x", json={"model": "m", "metadata": {}}).json() == {"model": "m"}
    assert proxy.exchanges[0].body == {"model": "m", "metadata": {}}
