"""`penstock chat --url` and `penstock top` against a running server."""

import io
import sys

import pytest

from penstock.cli import main
from penstock.cli.http import open_path
from penstock.cli.top.sample import Samples
from tests.server.running import RunningServer
from tests.support.terminal import Terminal


def test_a_chat_with_a_server_is_answered_by_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nmore\n/exit\n"))
    before = server.metrics()["penstock_generation_tokens_total"]
    assert main(["chat", "--url", server.url, "--max-tokens", "5", "--temperature", "0"]) == 0
    assert server.metrics()["penstock_generation_tokens_total"] == before + 10
    assert capsys.readouterr().out.strip()


def test_top_prints_a_servers_load_once_and_leaves_no_failed_calls(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", server.url, "--once", "--interval", "0.1"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"tiny at {server.url}, up ")
    assert any(line.startswith("requests 0 running, 0 waiting") for line in lines)
    assert any(line.startswith("0 up 0 0 0%") for line in lines)


def test_top_lists_the_open_requests(server: RunningServer) -> None:
    samples = Samples(server.url, None)
    body = {"prompt": "x", "max_tokens": 400, "n": 4, "ignore_eos": True, "stream": True, "seed": 1}
    with open_path(server.url, "/v1/completions", body) as answer:
        assert answer.readline()
        samples.take()
    assert samples.requests is not None
    (request,) = samples.requests
    assert request["prompt_tokens"] == 1
    assert request["first_token"] > request["arrival"]
    assert request["age"] > 0


def test_top_watches_a_server_until_q(server: RunningServer) -> None:
    terminal = Terminal("top", server.url, "--interval", "0.1")
    for _ in range(3):
        terminal.wait_for("KV cache")
    terminal.type("q")
    assert terminal.end() == 0
