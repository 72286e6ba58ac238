"""Bodies that mean harm, or nothing: every route answers them in its dialect's shape, and the server goes on."""

import asyncio
import json
import socket

import httpx
import pytest

from tests.server.running import memory_mib
from tests.support import fetch
from tests.support.waiting import wait_until

MESSAGES = [{"role": "user", "content": "the quick"}]
BODIES = {
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "the quick", "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "the quick", "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGES},
    "/generate": {"inputs": "the quick", "parameters": {"max_new_tokens": 2}},
    "/generate_stream": {"inputs": "the quick", "parameters": {"max_new_tokens": 2}},
    "/": {"inputs": "the quick", "parameters": {"max_new_tokens": 2}},
    "/invocations": {"inputs": "the quick", "parameters": {"max_new_tokens": 2}},
    "/tokenize": {"inputs": "the quick"},
    "/chat_tokenize": {"messages": MESSAGES},
}
TGI = {"/generate", "/generate_stream", "/", "/invocations", "/tokenize", "/chat_tokenize"}
JSON = {"content-type": "application/json"}

NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"text"',
    b"\xff\xfe\x00",
    b'{"a": 1' + b" " * 1000,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"[" * 100_000 + b"]" * 100_000,
    b"9" * 5000,
    b"NaN",
    b'{"\\ud800": 1}',
    b'{"' + b"a" * 10_000 + b'": 1}',
    b"{}",
]

VALUES = [
    None,
    True,
    [],
    {},
    "",
    "\ud800",
    "\x00",
    -1,
    0,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    -(2**63) - 1,
    2**64,
    10**400,
    [[[[]]]],
    [None],
    ["\udfff"],
    [2**70],
    {"a": {"b": [1]}},
    "x" * 20_000,
]


def check_refusal(path, answer):
    """In the shape of the path's dialect."""
    body = answer.json()
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"]
    if path in TGI:
        assert (set(body), body["error_type"]) == ({"error", "error_type"}, "validation")
        message = body["error"]
    elif path.startswith("/v1/messages"):
        assert (set(body), body["type"]) == ({"type", "error"}, "error")
        message = body["error"]["message"]
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        message = body["error"]["message"]
    assert message
    assert "server failed" not in message


def is_healthy(server):
    return fetch.get(f"{server.url}/health").status_code == 200 and server.idle()


def send_all(server, path, contents, headers=JSON):
    """The answers to many bodies, some of them at a time."""

    async def talk():
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(http.post(path, content=content, headers=headers) for content in contents))

    return asyncio.run(talk())


@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_is_no_request_is_refused_in_the_dialects_shape(server, path):
    form = {"content-type": "application/x-www-form-urlencoded"}
    answers = send_all(server, path, NO_REQUESTS)
    answers += send_all(server, path, [b"a=b"], form)
    answers += send_all(server, path, [b"\x1f\x8b\x08"], JSON | {"content-encoding": "gzip"})
    for answer in answers:
        check_refusal(path, answer)
    wait_until(lambda: is_healthy(server))


@pytest.mark.parametrize("path", BODIES)
def test_any_value_in_any_field_is_obeyed_or_refused_but_never_a_failure(server, path):
    valid = BODIES[path]
    fields = [(name,) for name in valid if name != "parameters"] + [("temperature",), ("stop",), ("stream",)]
    fields += [("parameters", name) for name in ("temperature", "seed", "stop", "best_of") if "parameters" in valid]
    fields += [("messages", 0, name) for name in ("content", "role") if "messages" in valid]
    contents = [json.dumps(replaced(valid, field, value)).encode() for field in fields for value in VALUES]
    answers = send_all(server, path, contents)
    for answer in answers:
        if answer.status_code != 200:
            check_refusal(path, answer)
    assert any(answer.status_code != 200 for answer in answers)
    wait_until(lambda: is_healthy(server))


def replaced(body, field, value):
    """A copy of the body with another value at a place."""
    body = json.loads(json.dumps(body))
    *above, last = field
    at = body
    for key in above:
        at = at[key]
    at[last] = value
    return body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/generate"])
def test_a_body_that_never_ends_holds_nobody_up(server, path):
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(BODIES[path]).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    half = [socket.create_connection((host, int(port))) for _ in range(20)]
    for connection in half:
        connection.sendall(head.encode() + content[: len(content) // 2])
    assert fetch.post(server.url + path, content=content, headers=JSON, timeout=60).status_code == 200
    for connection in half[:10]:
        connection.close()
    with half[10] as patient:  # one that was only slow is served
        patient.sendall(content[len(content) // 2 :])
        assert patient.recv(4096).startswith(b"HTTP/1.1 200")
    for connection in half[11:]:
        connection.close()
    wait_until(lambda: is_healthy(server))


MANY = 300_000
LARGE = [
    ("/v1/completions", {"prompt": [None] * MANY}),
    ("/v1/completions", {"prompt": ["a"] * MANY}),
    ("/v1/completions", {"prompt": [[1]] * MANY}),
    ("/v1/completions", {"stop": [None] * MANY}),
    ("/v1/completions", {f"x{i}": i for i in range(MANY // 3)}),
    ("/v1/responses", {"metadata": {str(i): i for i in range(MANY // 3)}}),
    ("/v1/chat/completions", {"messages": [None] * MANY}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [None] * MANY}]}),
    ("/v1/responses", {"input": [None] * MANY}),
    ("/v1/messages", {"system": [None] * MANY}),
    ("/tokenize", {"inputs": "x " * 2**20}),
]


def test_a_large_body_of_mistakes_costs_no_more_than_its_first(server):
    def peak():
        return memory_mib(server.process.pid, "VmHWM")

    before = peak()
    for path, change in LARGE:
        (answer,) = send_all(server, path, [json.dumps(BODIES[path] | change).encode()])
        check_refusal(path, answer)
    assert peak() - before < 200, "MiB; each mistake told apart took gigabytes"


def test_the_memory_of_large_bodies_is_given_back(server):
    content = json.dumps(BODIES["/v1/completions"] | {"prompt": [70_000 + i % 1000 for i in range(580_000)]}).encode()
    before = memory_mib(server.process.pid)
    for answer in send_all(server, "/v1/completions", [content] * 40):
        check_refusal("/v1/completions", answer)
    wait_until(lambda: memory_mib(server.process.pid) - before < 80, 20)


@pytest.mark.parametrize(
    "field",
    [
        {"x-request-id": b"\xff\xfe" * 50},
        {"x-queue-timeout": b"\xb2"},
        {"last-event-id": b"\xff/1.\xb2"},
        {"last-event-id": b"a/" + b"9" * 10_000},
        {"authorization": b"Bearer \xff"},
        {"content-type": b'application/json; charset=\xff"'},
        {"traceparent": b"\xff"},
        {"host": b"["},
    ],
)
def test_hostile_header_fields_are_obeyed_or_refused_but_never_a_failure(server, field):
    for path, body in BODIES.items():
        for more in ({}, {"stream": True}):
            content = json.dumps(body | more).encode()
            (answer,) = send_all(server, path, [content], JSON | field)
            assert answer.status_code < 500, answer.text
            assert answer.headers["x-request-id"].isprintable()


@pytest.mark.parametrize(
    "target",
    ["/%ff%00", "/v1/requests/%ed%a0%80", "/v1/models/%ff%fe?a=%ff", "/debug/timeline?seconds=%ff&seconds=%00", "//"],
)
def test_hostile_targets_are_refused(server, target):
    answer = fetch.get(server.url + target)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()


def test_others_are_answered_while_a_very_long_conversation_is_read(server):
    """It takes seconds of the server's core, and then is too long for the model."""

    async def talk():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            body = {"model": "tiny", "messages": MESSAGES * 30_000}
            long = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            answered = 0
            while not long.done():
                answer = await http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"])
                assert answer.status_code == 200
                answered += not long.done()
            return long.result(), answered

    refusal, answered = asyncio.run(talk())
    check_refusal("/v1/chat/completions", refusal)
    assert "context" in refusal.json()["error"]["message"]
    assert answered > 5


def test_what_is_given_back_with_an_answer_is_text(server):
    content = json.dumps(BODIES["/v1/responses"] | {"metadata": {"a": "\ud800"}}).encode()
    (answer,) = send_all(server, "/v1/responses", [content])
    check_refusal("/v1/responses", answer)


def test_hostile_bodies_leave_no_traceback(server):
    fetch.post(f"{server.url}/v1/completions", content=b"[" * 100_000, headers=JSON)
    assert not any("Traceback" in line for line in server.log), server.log
