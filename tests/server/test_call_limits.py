"""What calls pass before any work: over a bare application, without a socket."""

import asyncio
import json

import pytest

from penstock.frontend.limits import ANYONE
from penstock.server.call_context import context_of
from penstock.server.call_limits import CallLimits
from penstock.server.config import CallLimitsConfig
from penstock.server.keys import load_keys


async def echo(scope, receive, send):
    """Answers with the size of the body; for /slow, when the client goes."""
    message = await receive()
    if scope["path"] == "/slow":
        await receive()
    body = json.dumps([len(message["body"]), message["more_body"], context_of(scope).caller is not ANYONE])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})


def make_gate(keys=None, **limits):
    return CallLimits(echo, load_keys(keys, None, private_cache=False), CallLimitsConfig(**limits))


def make_scope(path="/v1/x", method="POST", headers=()):
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http", "path": path, "method": method, "headers": sent}


async def call(gate, *parts, path="/v1/x", method="POST", headers=(), then=None):
    """Send the parts of a body, and `then` a last message; (status, body, headers) of the answer."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if then is None and messages:
        messages[-1]["more_body"] = False
    sent = []
    waiting = asyncio.Event()

    async def receive():
        if messages:
            return messages.pop(0)
        if then is not None:
            return then
        return await waiting.wait()

    async def send(message):
        sent.append(message)

    scope = make_scope(path, method, headers)
    await gate(scope, receive, send)
    if not sent:
        return None
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:])), told


def test_a_body_reaches_the_application_in_one_piece():
    assert asyncio.run(call(make_gate(), b"abc", b"", b"de"))[:2] == (200, [5, False, True])


def test_a_body_beyond_the_limit_is_refused_however_it_is_announced():
    gate = make_gate(max_body_bytes=10)
    for parts, headers in (
        ([b"x" * 11], ()),
        ([b"x" * 6] * 2, ()),
        ([b"x"], [("content-length", "11")]),
        ([b"x" * 100] * 50, [("content-length", "5000")]),
    ):
        status, body, told = asyncio.run(call(gate, *parts, headers=headers))
        assert (status, body["error"]["code"], told["connection"]) == (413, "request_too_large", "close")
    assert asyncio.run(call(gate, b"x" * 10))[0] == 200


def test_what_a_call_holds_beside_its_body_counts_until_its_end():
    async def hold(scope, receive, send):
        for _ in range(2 if scope["path"] == "/v1/twice" else 1):
            context_of(scope).hold_bytes(600_000)
        await echo(scope, receive, send)

    async def talk():
        limits = CallLimitsConfig(max_body_bytes=1000, max_held_body_bytes=1_000_000)
        gate = CallLimits(hold, load_keys(None, None, private_cache=False), limits)
        for path, status in (("/v1/x", 200), ("/v1/x", 200), ("/v1/twice", 429), ("/v1/x", 200)):
            assert (await call(gate, b"x", path=path))[0] == status

    asyncio.run(talk())


def test_a_body_that_does_not_arrive_is_given_up():
    async def half_sent():
        gate = make_gate(body_timeout=0.05)
        never = asyncio.Event()

        async def receive():
            await never.wait()

        sent = []

        async def send(message):
            sent.append(message)

        await gate(make_scope(), receive, send)
        assert sent[0]["status"] == 408

    asyncio.run(half_sent())


def test_a_client_that_leaves_in_mid_body_is_not_answered_and_holds_nothing():
    async def vanish():
        gate = make_gate(max_concurrent_requests=1)
        assert await call(gate, b"half", then={"type": "http.disconnect"}) is None
        assert (await call(gate, b"whole"))[0] == 200

    asyncio.run(vanish())


def test_calls_beyond_the_limit_are_refused_and_let_in_once_others_end():
    async def crowd():
        gate = make_gate(max_concurrent_requests=2)
        open_ones = [asyncio.ensure_future(call(gate, b"x", path="/slow")) for _ in range(2)]
        await asyncio.sleep(0)
        status, body, told = await call(gate, b"x")
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert int(told["retry-after"]) >= 1
        assert (
            await call(
                gate, method="GET", path="/v1/models", then={"type": "http.request", "body": b"", "more_body": False}
            )
        )[0] == 200
        for stream in open_ones:
            stream.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        assert (await call(gate, b"x"))[0] == 200

    asyncio.run(crowd())


def test_without_its_key_a_call_gets_nowhere_but_to_health_metrics_and_docs():
    gate = make_gate("sk-one")
    end = {"type": "http.request", "body": b"", "more_body": False}
    status, body, _ = asyncio.run(call(gate, b"x"))
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert asyncio.run(call(gate, path="/v1/models", method="GET", then=end))[0] == 401
    for path in ("/health", "/", "/docs", "/redoc", "/openapi.json"):
        assert asyncio.run(call(gate, path=path, method="GET", then=end))[0] == 200
    for path in ("/metrics", "/"):
        assert asyncio.run(call(gate, path=path, method="POST", then=end))[0] == 401
    assert asyncio.run(call(gate, b"x", headers=[("authorization", "Bearer sk-one")]))[0] == 200


def test_the_bodies_of_open_calls_share_a_bound_and_small_ones_do_not_count():
    async def crowd():
        gate = make_gate(max_body_bytes=200_000, max_held_body_bytes=350_000)
        large = b"x" * 150_000
        open_ones = [asyncio.ensure_future(call(gate, large, path="/slow")) for _ in range(2)]
        await asyncio.sleep(0)
        status, body, told = await call(gate, large[:75_000], large[75_000:])
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert "max_held_body_bytes" in body["error"]["message"]
        assert int(told["retry-after"]) >= 1
        assert (await call(gate, b"x" * 1000))[0] == 200
        for stream in open_ones:
            stream.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        for _ in range(3):
            assert (await call(gate, large))[0] == 200

    asyncio.run(crowd())


def test_a_body_that_the_client_asks_about_is_refused_before_it_is_sent():
    headers = [("content-length", "11"), ("expect", "100-continue")]

    async def ask():
        sent = []

        async def receive():
            raise AssertionError("that would ask for the body")

        async def send(message):
            sent.append(message)

        await make_gate(max_body_bytes=10)(make_scope(headers=headers), receive, send)
        assert sent[0]["status"] == 413

    asyncio.run(ask())


@pytest.mark.parametrize("given", ["-1", "0", "nan", "inf", "1_0", "\xa05", "\xb2", "x" * 5000, "", "1e999"])
def test_a_queue_timeout_that_is_no_number_of_seconds_is_refused_by_its_name(given):
    status, body, _ = asyncio.run(call(make_gate(), b"x", headers=[("x-queue-timeout", given)]))
    assert (status, body["error"]["param"]) == (400, "x-queue-timeout")
    assert len(body["error"]["message"]) < 500
