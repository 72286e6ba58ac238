"""What a connection may send, and how long it may take: over real sockets, before any call and after the first."""

import asyncio
import contextlib
import json
import re
import socket
import struct

import h11
import pytest

from penstock.server.config import CallLimitsConfig
from penstock.server.connection import BoundedConnection, BoundedProtocol
from tests.server.running import memory_mib, running_server
from tests.support import fetch
from tests.support.waiting import wait_until

SECONDS = 1.0
CONNECTIONS = 40
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
ONCE = HEAD + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def bounded(tiny_llama):
    flags = ["--served-model-name", "tiny", "--threads", "1", "--body-timeout", str(SECONDS)]
    flags += ["--max-connections", str(CONNECTIONS), "--max-concurrent-requests", "30"]
    with running_server("--model", str(tiny_llama), *flags) as running:
        yield running


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_to_end(connection):
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def answers_to(server, *parts):
    """All that the server says until it closes the connection."""
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):  # it may have heard enough
            for part in parts:
                connection.sendall(part)
        return read_to_end(connection)


def statuses(received):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def fields(count):
    return b"".join(b"a%d: b\r\n" % number for number in range(count))


TOO_MUCH = {
    "one field": (HEAD + b"a: " + b"x" * 40_000 + b"\r\n\r\n", 431, "max_header_bytes"),
    "a field without end": (HEAD + b"a: " + b"x" * 3_000_000, 431, "max_header_bytes"),
    "many fields": (HEAD + fields(200) + b"\r\n", 431, "max_headers"),
    "fields without end": (HEAD + fields(200_000), 431, "max_header"),
    "a target": (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "8192"),
    "a target without end": (b"GET /" + b"x" * 1_000_000, 414, "8192"),
    "trailers": (CHUNKED + b"0\r\n" + fields(200) + b"\r\n", 431, "trailer"),
    "trailers without end": (CHUNKED + b"0\r\n" + fields(200_000), 431, "trailer"),
    "a chunk's extension": (CHUNKED + b"1;" + b"x" * 1_000_000, 431, "extension"),
    "chunks of a byte": (CHUNKED + b"1\r\n \r\n" * 20_000, 400, "chunks"),
    "a bad chunk": (CHUNKED + b"zz\r\n", 400, "chunk"),
    "another version": (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "HTTP/1.1"),
    "another encoding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "chunked"),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "Content-Length"),
    "two framings": (CHUNKED.replace(b"Host", b"Content-Length: 4\r\nHost") + b"0\r\n\r\n" + ONCE, 400, "not both"),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "request line"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
@pytest.mark.parametrize("before", [b"", ONCE, ONCE * 3], ids=["first", "second", "pipelined"])
def test_what_is_beyond_a_bound_is_refused_in_any_request_of_a_connection(bounded, name, before):
    sent, status, word = TOO_MUCH[name]
    received = answers_to(bounded, before, sent)
    assert statuses(received) == [200] * before.count(b"GET") + [status]
    head, _, body = received.rpartition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    assert word in json.dumps(json.loads(body))
    assert not any("Traceback" in line or "ERROR" in line for line in bounded.log), bounded.log


def test_a_refusal_has_the_shape_of_the_paths_dialect_and_is_counted(bounded):
    before = bounded.metrics().get('penstock_request_failures_total{reason="headers_too_large"}', 0)
    many = b" HTTP/1.1\r\nHost: x\r\n" + fields(200) + b"\r\n"
    anthropic = answers_to(bounded, b"POST /v1/messages" + many)
    assert json.loads(anthropic.rpartition(b"\r\n\r\n")[2])["type"] == "error"
    tgi = answers_to(bounded, b"POST /generate" + many)
    assert set(json.loads(tgi.rpartition(b"\r\n\r\n")[2])) == {"error", "error_type"}
    assert answers_to(bounded, b"HEAD /health" + many).endswith(b"\r\n\r\n"), "no body"
    assert bounded.metrics()['penstock_request_failures_total{reason="headers_too_large"}'] == before + 3


def test_heads_up_to_the_bounds_are_read_in_whatever_pieces_they_come(bounded):
    head = HEAD + fields(90) + b"a: " + b"x" * 30_000 + b"\r\nConnection: close\r\n\r\n"
    assert statuses(answers_to(bounded, head)) == [200]
    assert statuses(answers_to(bounded, *(head[at : at + 701] for at in range(0, len(head), 701)))) == [200]
    body = b'{"model": "tiny", "prompt": [1, 2], "max_tokens": 1}'
    pieces = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]))
    ending = b"0\r\na: b\r\n\r\n"
    sent = CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + pieces + ending
    assert statuses(answers_to(bounded, sent)) == [200]


@pytest.mark.parametrize("before", [b"", ONCE], ids=["first", "second"])
def test_a_head_that_does_not_arrive_in_time_is_given_up(bounded, before):
    received = answers_to(bounded, before, HEAD)
    assert statuses(received) == [200] * bool(before) + [408]
    with connect(bounded) as connection, contextlib.suppress(ConnectionError):  # drop by drop, it is no other
        connection.sendall(before)
        connection.settimeout(SECONDS / 20)
        received = b""
        for _ in range(1000):
            connection.sendall(b"G" if not received else b"x")
            with contextlib.suppress(TimeoutError):
                if (data := connection.recv(1 << 16)) == b"":
                    break
                received += data
        else:
            pytest.fail("it was never given up")


@pytest.mark.parametrize("sent", [b"", POST + b"Content-Length: 100\r\n\r\n{", CHUNKED + b"5\r\n{"])
def test_a_connection_that_stops_in_the_middle_is_ended(bounded, sent):
    assert statuses(answers_to(bounded, sent)) == ([408] if sent else [])


def test_the_rest_of_a_body_that_was_answered_already_must_come_in_time(bounded):
    assert statuses(answers_to(bounded, HEAD + b"Content-Length: 100\r\n\r\nabc")) == [200]


def test_what_is_sent_ahead_of_an_answer_is_not_read_without_bound(bounded):
    body = b'{"model": "tiny", "prompt": [5], "max_tokens": 400, "n": 8, "ignore_eos": true}'
    with connect(bounded) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.settimeout(0.2)
        sent = 0
        before = memory_mib(bounded.process.pid)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < 64_000_000:
                sent += connection.send(ONCE * 2000)
        assert memory_mib(bounded.process.pid) - before < 16, "MiB"
    wait_until(bounded.idle)


def test_a_flood_of_heads_leaves_the_memory_as_it_was(bounded):
    answers_to(bounded, HEAD + fields(200_000))
    before = memory_mib(bounded.process.pid)
    for _ in range(30):
        answers_to(bounded, ONCE, HEAD + fields(200_000))
        answers_to(bounded, HEAD + b"a: " + b"x" * 6_000_000)
    assert memory_mib(bounded.process.pid) - before < 16, "MiB"


def test_for_a_connection_too_many_the_longest_idle_one_is_closed(bounded):
    wait_until(lambda: fetch.get(f"{bounded.url}/health").status_code == 200)
    body = b'{"model": "tiny", "prompt": [5], "max_tokens": 300, "stream": true, "ignore_eos": true}'
    with contextlib.ExitStack() as opened:
        busy = opened.enter_context(connect(bounded))
        busy.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b" 200 " in busy.recv(1 << 16)
        idle = [opened.enter_context(connect(bounded)) for _ in range(2 * CONNECTIONS)]
        assert fetch.get(f"{bounded.url}/health").status_code == 200
        assert read_to_end(idle[0]) == b""
        received = b""
        while b"[DONE]" not in received:
            received += busy.recv(1 << 16)
    wait_until(bounded.idle)


def test_an_offer_of_another_protocol_is_passed_over(bounded):
    body = b'{"model": "tiny", "prompt": [1, 2], "max_tokens": 1}'
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    call = POST + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = ONCE.replace(b"Host", b"Connection: close\r\nHost")
    received = answers_to(bounded, call, call, last)
    assert statuses(received) == [200] * 3
    assert received.count(b'"text_completion"') == 2
    web_socket = HEAD + b"Connection: close, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert statuses(answers_to(bounded, web_socket)) == [200]


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_an_answer_that_ends_with_the_connection(bounded, stream):
    body = json.dumps({"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    head, _, told = answers_to(bounded, head + body).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    if stream:
        assert told.startswith(b"data: ")
        assert told.endswith(b"data: [DONE]\n\n")
    else:
        assert len(told) == int(re.search(rb"content-length: (\d+)", head)[1])
        assert json.loads(told)["object"] == "text_completion"


@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.1", b"GET / HTTP/1.0", b"HEAD / HTTP/1.1"])
@pytest.mark.parametrize("headers", [[], [("content-length", "5")]], ids=["of unknown length", "of known length"])
def test_responses_are_framed_as_h11_frames_them(request_line, headers):
    def sent(connection):
        connection.receive_data(request_line + b"\r\nHost: x\r\n\r\n")
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        bodies = [] if request_line.startswith(b"HEAD") else [b"abc", b"", b"de"]
        events = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=body) for body in bodies)]
        return [connection.send(event) for event in (*events, h11.EndOfMessage())]

    assert sent(BoundedConnection(CallLimitsConfig())) == sent(h11.Connection(h11.SERVER))


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping", "/", "/metrics", "/v1/models"])
def test_head_gets_the_head_of_get(bounded, path):
    answer, whole = fetch.head(bounded.url + path), fetch.get(bounded.url + path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert int(answer.headers["content-length"]) == len(whole.content)


def test_a_body_too_large_is_refused_before_it_is_sent_if_the_client_asks(bounded):
    sent = POST + b"Content-Length: 10000000\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    assert statuses(answers_to(bounded, sent)) == [413]


def test_a_client_that_resets_its_connection_just_as_it_is_refused_raises_nothing():
    async def talk():
        made = asyncio.get_running_loop().create_future()

        class Accepting(asyncio.Protocol):
            def connection_made(self, transport):
                made.set_result(transport)

        server = await asyncio.get_running_loop().create_server(Accepting, "127.0.0.1", 0)
        client = socket.create_connection(server.sockets[0].getsockname())
        protocol = BoundedProtocol.__new__(BoundedProtocol)
        protocol.transport = await made
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert not protocol._end_writing()
        protocol.transport.abort()
        server.close()
        await asyncio.sleep(0.01)  # the sockets are closed by the loop

    asyncio.run(talk())
