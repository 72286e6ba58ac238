"""`penstock serve` from outside: start, health, clients that vanish, engines that die, and the end."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from penstock import __version__
from penstock.checkpoint.added import Added
from penstock.config.engine_config import EngineConfig
from penstock.errors import ConfigError
from penstock.native import library_path
from penstock.server.config import CallLimitsConfig
from penstock.server.serve import _allow_files, _unserved
from tests.server.running import RunningServer, running_server
from tests.support import fetch
from tests.support.needs import needs_native
from tests.support.waiting import alive, stop, wait_until

LONG = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "temperature": 0}
LONGER = {"n": 8, "max_tokens": 4000}
"""For `own_server`: thousands of steps, which no machine is through with before the test asks its next question."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a server started by the test puts its temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def roomy_llama(tmp_path_factory):
    from tests.support.checkpoints import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("roomy-llama"), max_position_embeddings=8192)


PATIENT = ("--threads", "1", "--max-unread-tokens", "1000000", "--drain-timeout", "200")


@pytest.fixture
def own_server(roomy_llama, folder):
    """A server that the test may stop or break, and that waits for slow readers. One at a time: it has one thread."""
    with running_server("--model", str(roomy_llama), *PATIENT) as running:
        yield running


@pytest.fixture(scope="module")
def lasting_server(roomy_llama):
    """Likewise, but it outlives the tests, which may end its engine."""
    with running_server("--model", str(roomy_llama), *PATIENT) as running:
        yield running


def open_stream(server, **body):
    """A raw connection with a streamed completion on it, whose first event has come."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps({"model": server.model, "stream": True} | LONG | body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    assert received.startswith(b"HTTP/1.1 200"), received
    return connection


# ── while it runs ────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_native
def test_neither_process_loads_torch_where_native_kernels_compute(server):
    server.post("/v1/completions", prompt="the quick")
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, server.engine_pid)}
    assert library_path().name in maps[server.engine_pid]
    assert not [pid for pid, mapped in maps.items() if "torch" in mapped]


def test_the_memory_plan_is_printed_at_the_start(server):
    assert any(re.search(r"Memory: [\d.]+ [KM]iB weights \+ up to .* KV cache", line) for line in server.log)


def test_health_is_good_when_idle_and_at_work(server):
    for path in ("/health", "/ping", "/"):
        assert fetch.get(f"{server.url}{path}").json() == {"status": "ok", "reason": None}
    connection = open_stream(server)
    assert fetch.get(f"{server.url}/health").status_code == 200
    connection.close()


def test_each_answer_has_a_request_id_and_a_callers_own_is_kept(server):
    ids = {fetch.get(f"{server.url}/v1/models").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    for given, kept in (("abc-1", True), ("x" * 200, False), ("a b", False)):
        answer = fetch.get(f"{server.url}/nothing", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) is kept


def test_the_openapi_page_names_every_route_and_its_errors(server):
    paths = fetch.get(f"{server.url}/openapi.json").json()["paths"]
    assert set(paths) > {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/generate",
        "/generate_stream",
        "/",
        "/info",
        "/tokenize",
        "/chat_tokenize",
        "/invocations",
    }
    chat = paths["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "429", "500", "503", "default"} == set(chat["responses"])
    assert fetch.get(f"{server.url}/docs").status_code == 200


def test_metrics_count_what_was_done(server):
    wait_until(server.idle)
    before = server.metrics()
    body = {"prompt": [7] * 40, "max_tokens": 5, "n": 2, "ignore_eos": True}
    usage = server.post("/v1/completions", **body).json()["usage"]
    again = server.post("/v1/completions", **body).json()["usage"]
    wait_until(server.idle)
    grown = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    assert usage == {
        "prompt_tokens": 40,
        "completion_tokens": 10,
        "total_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert again["prompt_tokens_details"]["cached_tokens"] == 32
    assert grown["penstock_prompt_tokens_total"] == 80
    assert grown["penstock_generation_tokens_total"] == 20
    assert grown['penstock_request_success_total{finished_reason="length"}'] == 4
    assert grown["penstock_time_to_first_token_seconds_count"] == 2
    assert grown["penstock_request_queue_time_seconds_count"] == 2
    assert grown["penstock_e2e_request_latency_seconds_count"] == 2
    assert grown["penstock_inter_token_latency_seconds_count"] == 16
    assert grown["penstock_prefix_cache_hits_total"] >= 32
    assert grown["penstock_engine_steps_total"] >= 10


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_a_stream_ends_its_requests(server, prompts):
    wait_until(server.idle)
    before = server.metrics()
    connection = open_stream(server, prompt=[[5, i] for i in range(prompts)], n=2)
    connection.close()
    wait_until(server.idle)
    grown = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    assert grown['penstock_request_success_total{finished_reason="abort"}'] == 2 * prompts
    assert grown["penstock_generation_tokens_total"] < 2 * prompts * 500


def test_a_client_that_leaves_before_its_answer_ends_its_request(server):
    wait_until(server.idle)
    before = server.metrics()
    body = {"model": "tiny", "n": 32} | LONG | {"prompt": [[5]] * 8}
    with pytest.raises(httpx.ReadTimeout):
        fetch.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.1))
    wait_until(server.idle)
    grown = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    assert grown['penstock_request_success_total{finished_reason="abort"}'] == 256


def test_a_client_that_leaves_is_no_failure_of_the_servers(server):
    def failures():
        found = {name: value for name, value in server.metrics().items() if "request_failures_total" in name}
        gone = found.pop('penstock_request_failures_total{reason="client_gone"}', 0)
        return gone, found.get('penstock_request_failures_total{reason="server_error"}', 0)

    wait_until(server.idle)
    gone, failed = failures()
    open_stream(server, n=32).close()
    body = {"model": "tiny", "n": 32} | LONG | {"prompt": [[5]] * 8}
    with pytest.raises(httpx.ReadTimeout):
        fetch.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.1))
    wait_until(lambda: failures()[0] == gone + 2)
    assert failures() == (gone + 2, failed)


def test_a_reader_that_never_reads_holds_nobody_up(server):
    connection = open_stream(server, n=8, logprobs=20)
    began = time.monotonic()
    assert server.post("/v1/completions", prompt="the quick", max_tokens=4).status_code == 200
    assert time.monotonic() - began < CallLimitsConfig().write_timeout, "it waited until the reader was cut off"
    connection.close()
    wait_until(server.idle)


def test_an_engine_that_stands_still_turns_health_bad_until_it_is_replaced(lasting_server):
    first = lasting_server.engine_pid
    assert [health(lasting_server, path) for path in ("", "/live", "/ready")] == [(200, "ok")] * 3
    os.kill(first, signal.SIGSTOP)
    before = lasting_server.engine_pids()
    wait_until(lambda: lasting_server.engine_pids() - before)  # one that became an engine: Popen waits for that
    (second,) = lasting_server.engine_pids() - before
    os.kill(second, signal.SIGSTOP)  # it has hardly begun to start: time to ask
    assert health(lasting_server) == (503, "unhealthy")
    assert fetch.get(f"{lasting_server.url}/ping").json()["error_type"] == "healthcheck", "as TGI's clients know it"
    assert health(lasting_server, "/ready") == (503, "unhealthy")
    assert health(lasting_server, "/live") == (200, "restarting")
    with contextlib.suppress(ProcessLookupError):  # it may be replaced already, too
        os.kill(second, signal.SIGCONT)
    wait_until(lambda: health(lasting_server) == (200, "ok"))
    assert lasting_server.engine_pid != first
    assert not alive(first)


def health(server, path=""):
    answer = fetch.get(f"{server.url}/health{path}")
    return answer.status_code, answer.json()["status"]


# ── the start ────────────────────────────────────────────────────────────────────────────────────────────────────────


def failing_start(*flags):
    server = RunningServer(*flags)
    try:
        return server.wait(), server.log
    finally:
        server.stop()


def test_a_server_that_cannot_start_says_what_it_loads_and_why_not(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    for model, words in ((str(tmp_path / "missing"), "missing"), (str(tmp_path), "NoSuchModel")):
        code, log = failing_start("--model", model)
        assert code == 2
        loading, *_, error = log  # a busy machine tells its progress
        assert f"penstock {__version__}: loading " in loading
        assert error.startswith("penstock: error: ")
        assert words in error


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, log = failing_start("--port", str(taken.getsockname()[1]))
    assert code == 2
    assert len(log) == 1
    assert "cannot listen on 127.0.0.1" in log[0]


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), (b"no certificate", "cannot be used")])
def test_tls_files_that_cannot_be_used_are_told_before_a_model_is_loaded(tmp_path, content, words):
    cert = tmp_path / "cert.pem"
    if content is not None:
        cert.write_bytes(content)
    code, log = failing_start("--tls-cert", str(cert))
    assert code == 2
    assert len(log) == 1
    assert f"tls_cert {cert}" in log[0]
    assert words in log[0]


def test_more_connections_than_files_may_be_open_are_refused_at_the_start():
    code, log = failing_start("--max-connections", str(2**40))
    assert code == 2
    assert len(log) == 1
    assert "max_connections" in log[0]
    assert "ulimit" in log[0]


def test_no_room_for_the_engines_sockets_is_told_with_what_to_do():
    server = RunningServer()
    try:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, 0))  # it still imports: no file may grow now
        code, log = server.wait(), server.log
    finally:
        server.stop()
    assert code == 2
    assert len(log) == 1, log
    assert "no room for a folder with the engine's sockets" in log[0]
    assert "set TMPDIR" in log[0]


@pytest.mark.parametrize(("number", "delay"), [(signal.SIGINT, 0.5), (signal.SIGTERM, 0.0)])
def test_a_server_stopped_while_it_starts_ends_cleanly(tiny_llama, number, delay):
    server = RunningServer("--model", str(tiny_llama), "--threads", "1")
    try:
        wait_until(server.children)
        time.sleep(delay)
        server.signal(number)
        assert server.wait() == 0
        assert not any("Traceback" in line for line in server.log), server.log
    finally:
        server.stop()


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_to_end(connection):
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def check_nothing_is_left(server, engine, folder):
    wait_until(lambda: not alive(engine))
    assert not any("Traceback" in line for line in server.log), server.log
    assert not list(folder.glob("penstock-*")), "the folder of the sockets"


def test_a_second_interrupt_ends_open_streams_with_an_error_event_and_leaves_nothing(own_server, folder):
    engine = own_server.engine_pid
    with open_stream(own_server, **LONGER) as connection:
        own_server.signal(signal.SIGINT)
        wait_until(lambda: any("another signal (Ctrl-C) stops the server now" in line for line in own_server.log))
        own_server.signal(signal.SIGINT)
        received = read_to_end(connection)
        assert own_server.wait() == 0
    assert b'"error":{"message":"the server is shutting down"' in received
    assert received.endswith(b"0\r\n\r\n"), "the answer itself is whole"
    check_nothing_is_left(own_server, engine, folder)


def test_a_signal_lets_open_streams_end_and_takes_nothing_new(own_server, folder):
    engine = own_server.engine_pid
    with open_stream(own_server, **LONGER | {"n": 2, "max_tokens": 2000}) as connection, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_to_end, connection)
        own_server.signal(signal.SIGTERM)
        wait_until(lambda: health(own_server, "/ready") == (503, "draining"))
        assert health(own_server) == (200, "ok")
        refused = own_server.post("/v1/completions", prompt="the quick")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        received = reading.result()
        assert own_server.wait() == 0
    assert received.count(b'"finish_reason":"length"') == 2
    assert b"[DONE]" in received
    told = [line.split(": ", 1)[1] for line in own_server.log if " INFO penstock.server: " in line]
    told = [line for line in told if not line.startswith("loading for ")]  # every 5 s, on a busy machine
    for number, start in ((0, "penstock "), (1, "ready in "), (3, "serving "), (4, "draining: "), (5, "stopped")):
        assert told[number].startswith(start), told
    assert told[0].startswith(f"penstock {__version__}: loading ")
    check_nothing_is_left(own_server, engine, folder)


def test_what_is_not_done_when_the_drain_ends_is_aborted(roomy_llama, folder):
    """A stream that has begun ends with `abort`; a call that was told nothing may be made again elsewhere."""
    flags = ("--threads", "1", "--drain-timeout", "0.2")
    with running_server("--model", str(roomy_llama), *flags) as server, ThreadPoolExecutor(1) as pool:
        engine = server.engine_pid
        with open_stream(server, **LONGER) as connection:
            whole = pool.submit(server.post, "/v1/completions", **LONG | LONGER)
            wait_until(lambda: server.metrics()["penstock_num_requests_running"] == 16)
            server.signal(signal.SIGTERM)
            received = read_to_end(connection)
            answer = whole.result()
            assert server.wait() == 0
    assert received.count(b'"finish_reason":"abort"') == 8
    assert b'"error"' not in received
    assert b"data: [DONE]" in received
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["code"] == "shutting_down"
    check_nothing_is_left(server, engine, folder)


def test_a_second_signal_stops_at_once(own_server, folder):
    engine = own_server.engine_pid
    with open_stream(own_server, **LONGER) as connection, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_to_end, connection)
        own_server.signal(signal.SIGTERM)
        wait_until(lambda: health(own_server, "/ready") == (503, "draining"))
        own_server.signal(signal.SIGTERM)
        assert own_server.wait() == 0
    assert b'"error":{"message":"the server is shutting down"' in reading.result()
    check_nothing_is_left(own_server, engine, folder)


def test_an_engine_that_is_killed_is_replaced_and_no_client_notices(lasting_server):
    restarts = lasting_server.metrics()["penstock_engine_restarts_total"]
    with openai.OpenAI(base_url=f"{lasting_server.url}/v1", api_key="none", max_retries=0) as client:
        body = {"model": lasting_server.model, "prompt": [5], "n": 8, "max_tokens": 200, "seed": 1, "temperature": 1.0}

        def answer():
            return [
                choice.text for choice in client.completions.create(**body, extra_body={"ignore_eos": True}).choices
            ]

        undisturbed = answer()
        outcome = {}
        waiter = threading.Thread(target=lambda: outcome.update(whole=answer()))
        waiter.start()
        texts = [""] * 8
        killed = False
        for chunk in client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            if not killed and len(texts[0]) > 20:
                killed = True
                os.kill(lasting_server.engine_pid, signal.SIGKILL)
        waiter.join()
    assert killed
    assert texts == undisturbed
    assert outcome["whole"] == undisturbed
    assert lasting_server.metrics()["penstock_engine_restarts_total"] == restarts + 1
    client.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_server_that_is_killed_takes_its_engine_along_even_a_stopped_one(own_server, folder, stopped):
    engine = own_server.engine_pid
    if stopped:  # the server first, or it would end the engine itself
        stop(own_server.process.pid)
        stop(engine)
    own_server.process.kill()
    own_server.process.wait()
    check_nothing_is_left(own_server, engine, folder)


@pytest.mark.parametrize(
    ("most", "advice"),
    [(64, "raise the limit (ulimit -Hn)"), (1000, "or lower max_connections and max_concurrent_requests to 744")],
)
def test_too_few_files_are_refused_with_advice_that_can_be_followed(monkeypatch, most, advice):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (most, most))
    with pytest.raises(ConfigError) as caught:
        _allow_files(5000)
    assert advice in str(caught.value)
    assert "-1" not in str(caught.value)


def test_what_a_server_writes_is_for_its_user_alone_whatever_the_umask(tiny_llama, folder):
    """This one takes the user's rights, and leaves those of all others."""
    named = ("--journal", str(folder / "journal"), "--kv-disk", str(folder / "cache.kv"))
    ranks = ("--tensor-parallel-size", "2", "--threads", "2")
    before = os.umask(0o700)
    try:
        server = RunningServer("--model", str(tiny_llama), *ranks, *named)
    finally:
        os.umask(before)
    try:
        server.wait_until_listening()
        assert server.post("/v1/completions", prompt=[5] * 40, max_tokens=3).status_code == 200
        modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}
        assert {folder / "journal", folder / "cache.kv"} <= set(modes)
        for path, mode in modes.items():
            assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"
    finally:
        server.stop()


def test_an_added_model_that_is_now_the_one_of_the_options_is_no_reason_to_warn() -> None:
    added = Added(("org/repo", "mario"))
    (warning,) = _unserved(None, added, EngineConfig.from_options(model="org/repo"))
    assert "to an earlier one: mario;" in warning
    assert not _unserved(None, Added(("org/repo",)), EngineConfig.from_options(model="org/repo"))
