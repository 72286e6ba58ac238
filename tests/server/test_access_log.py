"""One line a call in the log, and its failure in the metrics."""

import asyncio
import gc
import json
import ssl
import subprocess
import weakref

import httpx

from penstock.server.access_log import RequestId
from penstock.server.call_context import context_of
from penstock.server.logs import FIELDS
from tests.engine.rule_core import BROKEN, SLOW
from tests.server.running import running_server
from tests.server.test_app import with_app

HELLO = {"model": "rule", "prompt": [1, 2, 3], "max_tokens": 2}


def facts_of(caplog):
    return [getattr(record, FIELDS) for record in caplog.records if record.name == "penstock.access"]


def talk_and_look(model, caplog, talk):
    seen = {}

    async def run(http, engine, app):
        await talk(http, engine)
        seen.update(engine.metrics.failures.values)

    caplog.set_level("INFO", "penstock.access")
    with_app(run, model)
    return facts_of(caplog), seen


def test_a_call_is_told_in_one_line_with_its_id_and_counts(tmp_path, caplog):
    async def talk(http, engine):
        await http.post("/v1/completions", json=HELLO, headers={"x-request-id": "mine"})
        await http.get("/health")

    (facts,), failures = talk_and_look(tmp_path, caplog, talk)
    assert (facts["id"], facts["status"], facts["failure"]) == ("mine", 200, None)
    assert facts["client"] == "127.0.0.1:123"
    assert (facts["prompt_tokens"], facts["answer_tokens"], facts["finish"]) == (3, 2, "length")
    assert 0 <= facts["queue_seconds"] <= facts["first_token_seconds"] <= facts["seconds"]
    assert "prompts" not in facts
    assert failures == {}


def test_failures_are_told_and_counted_by_their_reason(tmp_path, caplog):
    async def talk(http, engine):
        await http.post("/v1/completions", json=HELLO | {"prompt": []})
        await http.post("/v1/completions", json=HELLO | {"prompt": [1] * 600})
        await http.get("/nothing")
        await http.post("/v1/completions", json=HELLO | {"prompt": [BROKEN], "stream": True, "max_tokens": 5})
        await http.post("/v1/completions", json=HELLO, headers={"x-queue-timeout": "-1"})

    told, failures = talk_and_look(tmp_path, caplog, talk)
    reasons = ["invalid_request", "context_length_exceeded", "not_found", "server_error", "invalid_request"]
    assert [facts["failure"] for facts in told] == reasons
    assert [facts["status"] for facts in told] == [400, 400, 404, 200, 400]
    assert failures == {reason: reasons.count(reason) for reason in reasons}


def test_a_failure_of_the_server_itself_is_told_and_counted(tmp_path, caplog):
    async def fail():
        raise RuntimeError("a bug")

    async def run(http, engine, app):
        app.add_api_route("/fails", fail)
        assert (await http.get("/fails")).status_code == 500
        assert dict(engine.metrics.failures.values) == {"server_error": 1}

    caplog.set_level("INFO", "penstock.access")
    with_app(run, tmp_path)
    (facts,) = facts_of(caplog)
    assert (facts["status"], facts["failure"]) == (500, "server_error")


def test_a_client_that_leaves_is_counted_as_gone(tmp_path, caplog):
    async def talk(http, engine):
        body = HELLO | {"prompt": [SLOW], "max_tokens": 500}
        client = asyncio.ensure_future(http.post("/v1/completions", json=body))
        while not engine.fleet.replicas[0].is_busy:
            await asyncio.sleep(0.01)
        client.cancel()
        while not facts_of(caplog):
            await asyncio.sleep(0.01)

    (facts,), failures = talk_and_look(tmp_path, caplog, talk)
    assert facts["failure"] == "client_gone"
    assert failures == {"client_gone": 1}


def test_over_tls_with_json_logs_that_hold_prompts_only_because_they_were_asked_for(tiny_llama, tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *options.split(), *files], check=True, capture_output=True)
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    flags = ["--threads", "1", "--log-prompts", "--tls-cert", str(cert), "--tls-key", str(key)]
    with running_server("--model", str(tiny_llama), *flags) as server:
        assert server.url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as client:
            body = {"model": server.model, "prompt": "the quick", "max_tokens": 1}
            assert client.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    told = [json.loads(line) for line in server.log if line.startswith("{")]
    (access,) = [line for line in told if line["logger"] == "penstock.access"]
    assert access["prompts"] == ["the quick"]


def test_an_ended_call_leaves_no_cycle_for_the_garbage_collector():
    """A cycle would keep its body, some MiB of it, until a full collection."""

    class Connection:
        """As uvicorn's: its functions belong to an object that refers to the scope."""

        def __init__(self):
            self.scope = {"type": "http", "headers": [], "path": "/"}

        async def receive(self):
            return {"type": "http.disconnect"}

        async def send(self, message):
            pass

    async def app(scope, receive, send):
        context_of(scope).receive = receive

    gc.disable()
    try:
        connection = Connection()
        asyncio.run(RequestId(app)(connection.scope, connection.receive, connection.send))
        left = weakref.ref(connection)
        del connection
        assert left() is None
    finally:
        gc.enable()
