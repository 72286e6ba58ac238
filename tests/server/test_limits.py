"""Limits from outside: floods, slow readers, half-sent bodies, keys that crowd each other. The counts return."""

import contextlib
import json
import os
import socket
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import httpx
import pytest

from penstock.server.config import CallLimitsConfig
from tests.server.running import RunningServer, running_server
from tests.support import fetch
from tests.support.schemas import slow_schema
from tests.support.waiting import wait_until

LONG = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "temperature": 0}
FLOOD = int(os.environ.get("TEST_FLOOD", "3000"))
KEYS = """
[[key]]
name = "loud"
secret = "sk-loud"

[[key]]
name = "quiet"
secret = "sk-quiet"

[[key]]
name = "metered"
secret = "sk-metered"
requests_per_minute = 3
tokens_per_minute = 100
priority = 2

[[key]]
name = "operator"
secret = "sk-operator"
operator = true

[[key]]
name = "private"
secret = "sk-private"
private_cache = true
"""


@pytest.fixture(scope="module")
def limited(tiny_llama, tmp_path_factory):
    """A server with keys, two slots and tight limits."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    flags = ["--api-keys", str(keys), "--max-num-seqs", "2", "--max-queued", "30", "--max-body-bytes", "100000"]
    flags += ["--max-unread-tokens", "100", "--body-timeout", "1", "--write-timeout", "1", "--threads", "1"]
    flags += ["--keep-alive-timeout", "6"]
    with running_server("--model", str(tiny_llama), "--max-concurrent-requests", "36", *flags) as running:
        yield running


def ask(server: RunningServer, key: str = "sk-loud", **body) -> httpx.Response:
    body = {"model": server.model, "prompt": [7], "max_tokens": 2, "ignore_eos": True} | body
    headers = {"authorization": f"Bearer {key}"}
    return fetch.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def error_of(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


class Caller:
    """One connection, cheap for its own process: thousands of calls are to crowd the server, not the test."""

    def __init__(self, server: RunningServer, key: str) -> None:
        self._connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._model = server.model

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, **body) -> tuple[int, str | None]:
        """Status, and the error's code; `last_id` is the answer's. Too many requests are told when to come back."""
        content = json.dumps({"model": self._model, "ignore_eos": True} | body)
        self._connection.request("POST", "/v1/completions", content, self._headers)
        answer = self._connection.getresponse()
        told = json.loads(answer.read())
        self.last_id = told.get("id")
        assert answer.status != 429 or int(answer.headers["retry-after"]) >= 1
        return answer.status, told["error"]["code"] if "error" in told else None


def resources(server: RunningServer) -> tuple[int, int]:
    """Threads, and open files."""
    folder = Path(f"/proc/{server.process.pid}")
    threads = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("Threads"))
    return int(threads.split()[1]), len(list((folder / "fd").iterdir()))


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def send_head(connection: socket.socket, length: int, path: str = "/v1/completions", **headers: str) -> None:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    connection.settimeout(60)
    while part := connection.recv(65536):
        received += part
    return received


def test_an_idle_connection_is_kept_for_its_time(limited):
    with connect(limited) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        answer.read()
        begun = time.monotonic()
        assert read_to_end(connection) == b""
        assert time.monotonic() - begun > 5.5, "clients and proxies reuse connections that were idle for so long"


def test_an_idle_connection_outlives_those_in_the_pools_of_clients_and_proxies():
    assert CallLimitsConfig().keep_alive_timeout > 90, "Go's clients keep theirs for 90 s, nginx's proxies for 60 s"


def test_no_answer_without_a_key_and_no_key_in_the_log(limited):
    assert error_of(ask(limited, "sk-wrong")) == (401, "invalid_api_key")
    assert fetch.get(f"{limited.url}/v1/models").status_code == 401
    for path in ("/health", "/docs", "/docs/init.js", "/openapi.json"):
        assert fetch.get(f"{limited.url}{path}").status_code == 200
    assert ask(limited).status_code == 200
    assert not any("sk-" in line for line in limited.log)


def seconds(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_small_pieces_of_an_answer_are_sent_at_once(limited):
    """A stream's events do not wait for the client's acknowledgement of those before (Nagle, delayed ACK: 40 ms)."""
    with Caller(limited, "sk-loud") as caller:
        caller.ask(prompt=[7], max_tokens=1)
        assert any(seconds(lambda: caller.ask(prompt=[7], max_tokens=1)) < 0.035 for _ in range(200))


def test_a_metered_key_is_told_what_is_left_and_refused_beyond_it(limited):
    first = ask(limited, "sk-metered", prompt=[7] * 40)
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) in range(55, 70)
    assert error_of(ask(limited, "sk-metered", priority=1)) == (400, None)
    beyond = ask(limited, "sk-metered", prompt=[7] * 90)
    assert error_of(beyond) == (429, "rate_limit_exceeded")
    assert int(beyond.headers["retry-after"]) >= 10
    spent = ask(limited, "sk-metered", priority=2)
    assert error_of(spent) == (429, "rate_limit_exceeded")
    assert "requests a minute" in spent.json()["error"]["message"]
    assert spent.headers["x-ratelimit-remaining-requests"] == "0"


def post_and_leave(server: RunningServer, path: str, body: dict, key: str = "sk-loud") -> None:
    """Send a call, and close its connection without waiting for the answer."""
    content = json.dumps({"model": server.model} | body).encode()
    with connect(server) as connection:
        send_head(connection, len(content), path, authorization=f"Bearer {key}")
        connection.sendall(content)


def test_structured_calls_whose_clients_have_left_hold_no_other_key_up(limited):
    assert ask(limited, "sk-quiet", structured_outputs={"choice": ["a", "b"]}).status_code == 200
    for seed in range(20):
        form = {"structured_outputs": {"json": slow_schema(seed, 8)}}
        post_and_leave(limited, "/v1/completions", {"prompt": [7], "max_tokens": 2} | form)
    begin = time.monotonic()
    assert ask(limited, "sk-quiet", structured_outputs={"choice": ["yes", "no"]}).status_code == 200
    assert time.monotonic() - begin < 6  # 20 s, when each of the 20 was checked


def test_conversations_whose_clients_have_left_hold_nobody_up(limited):
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(2501)]

    def chat():
        body = {"messages": turns[:1], "max_tokens": 2}
        return fetch.post(f"{limited.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer sk-quiet"})

    def lines():
        return [line for line in limited.log if "/v1/chat/completions" in line]

    assert chat().status_code == 200
    for _ in range(28):
        post_and_leave(limited, "/v1/chat/completions", {"messages": turns, "max_tokens": 2})
    wait_until(lambda: len(lines()) == 29)
    assert sum("failure=client_gone" in line for line in lines()) > 20
    assert chat().status_code == 200
    assert not any("Traceback" in line for line in limited.log)


def test_the_log_tells_at_the_start_how_many_keys_share_the_cache(limited):
    assert sum("4 API keys share one prefix cache" in line for line in limited.log) == 1


def test_a_private_cache_is_not_shared_with_other_keys(limited):
    cached: dict[str, list[int]] = {}
    for key in ("sk-loud", "sk-loud", "sk-quiet", "sk-private", "sk-private"):
        usage = ask(limited, key, prompt=[9] * 70).json()["usage"]
        cached.setdefault(key, []).append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == {"sk-loud": [0, 64], "sk-quiet": [64], "sk-private": [0, 64]}


def test_a_request_that_waits_longer_than_it_may_is_told_so_and_leaves_the_queue(limited):
    stop = threading.Event()

    def hold(_: int) -> list[int]:
        codes = []
        while not stop.is_set():
            codes.append(ask(limited, **LONG | {"n": 2}).status_code)
        return codes

    with ThreadPoolExecutor(8) as pool:
        holding = pool.map(hold, range(8))  # both slots, and a queue before them, for as long as is asked below
        try:
            wait_until(lambda: limited.metrics()["penstock_num_requests_waiting"] >= 5)
            answer = fetch.post(
                f"{limited.url}/v1/completions",
                json={"model": limited.model, "prompt": [1], "max_tokens": 1},
                headers={"authorization": "Bearer sk-loud", "x-queue-timeout": "0.05"},
            )
        finally:
            stop.set()
        assert error_of(answer) == (503, "queue_timeout")
        assert "in the queue" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert {code for codes in holding for code in codes} == {200}
    bad = fetch.post(f"{limited.url}/v1/completions", headers={"x-api-key": "sk-loud", "x-queue-timeout": "soon"})
    assert bad.status_code == 400
    wait_until(limited.idle)


@pytest.mark.parametrize("asked", [{"prompt": [[10**6]] * 33}, {"prompt": [[10**6]] * 17, "n": 2}])
def test_a_call_for_more_answers_than_may_ever_be_open_is_refused_before_its_prompts_are_read(limited, asked):
    refused = ask(limited, **asked)  # the tokens are none of the model's
    assert refused.status_code == 400
    assert f"asks for {33 + ('n' in asked)} answers; at most 32" in refused.json()["error"]["message"]


def test_a_flood_past_every_limit_is_answered_to_the_last_request_and_leaves_nothing(limited):
    """Most of the requests are refused at once."""
    wait_until(limited.idle)
    before, at_once, each = resources(limited), 100, FLOOD // 100
    step_update: Counter[tuple[int, str | None]] = Counter()

    def flood(connection: int) -> None:
        with Caller(limited, "sk-loud") as caller:
            for i in range(each):
                prompts = [[7]] * (16 if (connection + i) % 5 == 0 else 1)
                step_update[caller.ask(prompt=prompts, max_tokens=5)] += 1

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(flood, range(at_once)))
    assert step_update.total() == at_once * each
    assert set(step_update) == {(200, None), (429, "overloaded")}
    wait_until(limited.idle)
    assert fetch.get(f"{limited.url}/health").status_code == 200
    wait_until(lambda: resources(limited)[1] <= before[1] + 3)
    assert resources(limited)[0] <= before[0] + 2


def test_bodies_too_large_half_sent_or_never_sent_are_ended_and_leave_nothing(limited):
    wait_until(limited.idle)
    before = resources(limited)
    with connect(limited) as large:
        send_head(large, 100_000_000, x_api_key="sk-loud")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is cut off while it still sends
            for _ in range(100):
                large.sendall(b" " * 1_000_000)
    small = fetch.post(f"{limited.url}/v1/completions", content=b" " * 100_001, headers={"x-api-key": "sk-loud"})
    assert error_of(small) == (413, "request_too_large")
    half, silent, vanished = connect(limited), connect(limited), connect(limited)
    send_head(half, 50, x_api_key="sk-loud")
    half.sendall(b'{"model"')
    send_head(vanished, 50, x_api_key="sk-loud")
    vanished.close()
    assert read_to_end(half).startswith(b"HTTP/1.1 408")
    assert read_to_end(silent) == b""
    half.close()
    silent.close()
    wait_until(lambda: resources(limited)[1] <= before[1] + 1)
    assert ask(limited).status_code == 200


def test_a_reader_that_stops_reading_loses_its_request_and_then_its_connection(limited):
    wait_until(limited.idle)
    before = resources(limited)
    body = json.dumps({"model": limited.model, "stream": True, "logprobs": 20} | LONG | {"prompt": [[5]] * 4})
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = limited.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        send_head(slow, len(body), x_api_key="sk-loud")
        slow.sendall(body.encode())
        wait_until(lambda: limited.metrics()["penstock_num_requests_running"] > 0)
        assert ask(limited, "sk-quiet", max_tokens=3).status_code == 200, "it slows nobody"
        wait_until(limited.idle)
        wait_until(lambda: any("read nothing of its answer" in line for line in limited.log))
        wait_until(lambda: resources(limited)[1] <= before[1] + 1)
    assert limited.metrics()['penstock_request_success_total{finished_reason="abort"}'] > 0


def test_the_wait_of_a_quiet_key_stays_within_the_bound_while_another_floods_at_fifty_times_its_rate(limited):
    """It waits for no answer of the flood to end. In steps, and of several the median: a step takes a millisecond here,
    so some may pass before the engine hears of a request. `tests/core/test_shares.py` tests the exact bound.
    """
    wait_until(limited.idle)
    stop, answered = threading.Event(), threading.Semaphore(0)
    counts: Counter[str] = Counter()
    flood_tokens, times_its_rate = 40, 50

    def flood(_: int) -> list[int]:
        """How many steps its requests waited, of those that were answered."""
        waited = []
        with Caller(limited, "sk-loud") as caller:
            while not stop.is_set():
                status, _ = caller.ask(prompt=[7], max_tokens=flood_tokens)
                counts["loud"] += 1
                answered.release()
                if status == 200 and counts["loud"] % 10 == 0:
                    waited.append(steps_waited(limited, caller.last_id, "sk-loud"))
                time.sleep(0 if status == 200 else 0.04)
        return waited

    with ThreadPoolExecutor(45) as pool, Caller(limited, "sk-quiet") as caller:
        flooding = pool.map(flood, range(45))
        try:
            wait_until(lambda: limited.metrics()["penstock_num_requests_waiting"] >= 18, 120)
            waits = []
            for _ in range(12):
                for _ in range(times_its_rate):
                    assert answered.acquire(timeout=60), "the flood is not answered any more"
                assert caller.ask(prompt=[8], max_tokens=1) == (200, None)
                waits.append(steps_waited(limited, caller.last_id, "sk-quiet"))
                counts["quiet"] += 1
        finally:
            stop.set()
        floods = [steps for waited in flooding for steps in waited]
    wait_until(limited.idle)
    print(f"steps that the quiet waited: {sorted(waits)}; the flood: {sorted(floods)}; {counts}")
    assert statistics.median(waits) <= flood_tokens, "it waits for the flood"
    assert max(floods) > 6 * flood_tokens, "there was no flood"


def steps_waited(server: RunningServer, answer_id: str, key: str) -> int:
    told = fetch.get(f"{server.url}/v1/requests/{answer_id}/why", headers={"authorization": f"Bearer {key}"}).json()
    return sum(event["steps"] for event in told["requests"][0]["events"] if event["what"] == "waited")


def test_a_request_is_told_why_it_waited_and_only_to_its_key(limited):
    url, loud = limited.url, {"authorization": "Bearer sk-loud"}
    for attempt in range(5):  # on a busy machine the slots may be free again when the request arrives
        wait_until(limited.idle)
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(ask, limited, **LONG | {"n": 2})
            wait_until(lambda: limited.metrics()["penstock_num_requests_running"] == 2)
            answer = ask(limited, prompt=[3 + attempt] * 40, max_tokens=3)
            held.result()
        told = fetch.get(f"{url}/v1/requests/{answer.json()['id']}/why", headers=loud).json()
        if any(event.get("why") == "slots" for event in told["requests"][0]["events"]):
            break
    for name in (answer.json()["id"], answer.headers["x-request-id"]):
        (account,) = fetch.get(f"{url}/v1/requests/{name}/why", headers=loud).json()["requests"]
        events = account["events"]
        assert (account["state"], account["tenant"], account["prompt_tokens"]) == ("ended", "loud", 40)
        *waits, admitted, computed, generated = events  # a busy machine may give it other reasons to wait, too
        assert {event["what"] for event in waits} == {"waited"}
        assert "slots" in [event["why"] for event in waits]
        assert [event["what"] for event in (admitted, computed, generated)] == ["admitted", "computed", "generated"]
        assert 0 < sum(event["seconds"] for event in waits) < account["seconds_to_first_token"] < account["seconds"]
        assert computed["tokens"] == 40 - admitted["tokens"]
        for key in ("sk-quiet", "sk-private"):
            other = fetch.get(f"{url}/v1/requests/{name}/why", headers={"authorization": f"Bearer {key}"})
            assert other.status_code == 404
    assert fetch.get(f"{url}/debug/timeline", headers=loud).status_code == 403
    trace = fetch.get(f"{url}/debug/timeline?seconds=30", headers={"authorization": "Bearer sk-operator"}).json()
    assert sum(event["name"] == "execute" for event in trace["traceEvents"]) >= 100
