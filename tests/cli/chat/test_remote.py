import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from penstock.cli import main
from penstock.cli.chat.backend import Ending, Usage
from penstock.cli.chat.remote import RemoteBackend
from penstock.errors import PenstockError
from penstock.parsers.parts import Reasoning, Text


class Server(BaseHTTPRequestHandler):
    """Another server with OpenAI's API: it streams `events`, and keeps the last body."""

    events: ClassVar[list[Any]] = []
    body: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        if self.headers["authorization"] != "Bearer secret":
            self._send(401, b'{"error": {"message": "which key?"}}')
            return
        self._send(200, b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def do_POST(self) -> None:
        Server.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        lines = [event if isinstance(event, str) else json.dumps(event) for event in self.events]
        self._send(200, "".join(f"data: {line}\n\n" for line in lines).encode())

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def backend(url: str, **flags: Any) -> RemoteBackend:
    neutral: dict[str, Any] = {"stop": [], "bad_words": [], "structured": None}
    return RemoteBackend(url, "secret", argparse.Namespace(**neutral | flags))


def answer(url: str, *events: Any, **flags: Any) -> list[Any]:
    Server.events = [*events]
    return list(backend(url, **flags).stream([{"role": "user", "content": "hi"}], {"top_k": 3}))


def delta(reason: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": reason}]}


def test_reasoning_text_usage_and_the_end_are_read(url: str) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    events = [delta(role="assistant"), delta(reasoning_content="Hm."), delta("stop", content="Yes."), usage, "[DONE]"]
    assert answer(url, *events, stop=["END"]) == [Reasoning("Hm."), Text("Yes."), Ending("stop"), Usage(7, 2)]
    assert Server.body["model"] == "first"
    assert (Server.body["top_k"], Server.body["stop"]) == (3, ["END"])


def test_a_broken_stream_and_an_error_in_it_are_told(url: str) -> None:
    with pytest.raises(PenstockError, match="broke off before its end"):
        answer(url, delta(content="Y"))
    with pytest.raises(PenstockError, match="broke off"):
        answer(url, "{")
    with pytest.raises(PenstockError, match="not one of OpenAI's API"):
        answer(url, ["x"])
    assert answer(url, {"error": {"message": "lost"}}, "[DONE]") == [Ending("error", "lost")]


def test_a_model_that_is_not_served_is_refused_with_those_that_are(url: str) -> None:
    assert backend(url, model="second").model == "second"
    with pytest.raises(PenstockError, match="does not serve third: it serves first, second"):
        backend(url, model="third")


def test_flags_for_the_other_kind_of_chat_and_a_wrong_key_are_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in {
        ("--url", url, "--threads", "1"): "--threads is for a model in this process",
        ("first", "--model", "second", "--url", url): "two models are named",
        ("--api-key", "x"): "--api-key is for --url",
        ("--url", url, "--api-key", "wrong"): "answered 401: which key?",
        ("--url", "127.0.0.1:1"): "no answer from 127.0.0.1:1",
    }.items():
        assert main(["chat", *arguments]) == 2
        assert words in capsys.readouterr().err
