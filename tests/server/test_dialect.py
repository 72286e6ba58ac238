"""What all dialects share, seen through each: failures are told in its shape, of whole answers and of streams."""

import asyncio
import json

import pytest

from penstock.request import FinishReason
from penstock.server.config import ServerConfig
from penstock.server.limits import GateLimits
from tests.engine.rule_core import RuleCore
from tests.server.in_process import with_app

MESSAGES = [{"role": "user", "content": "the quick"}]
CALLS = {
    "/v1/chat/completions": {"model": "rule", "messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"model": "rule", "prompt": "the quick", "max_tokens": 8},
    "/v1/responses": {"model": "rule", "input": "the quick", "max_output_tokens": 8},
    "/v1/messages": {"model": "rule", "messages": MESSAGES, "max_tokens": 8},
    "/": {"inputs": "the quick", "parameters": {"max_new_tokens": 8}},
}
SHAPES = {
    "/v1/messages": lambda kind, message: {"type": "error", "error": {"type": kind, "message": message}},
    "/": lambda kind, message: {"error": message, "error_type": kind},
}


def openai_shape(kind, message, code=None):
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class BrokenCore(RuleCore):
    """Each sequence fails after its second token."""

    def step(self, *args):
        for key, (_, done) in list(self._running.items()):
            if done == 2:
                self.finish(*key, FinishReason.ERROR)
        return super().step(*args)


BROKEN_CORE = f"{__name__}:BrokenCore"


def events_of(answer):
    parts = [dict(line.split(": ", 1) for line in part.split("\n")) for part in answer.text[:-2].split("\n\n")]
    return [(part.get("event"), json.loads(part["data"])) for part in parts]


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/chat/completions", 500, "server_error"),
        ("/v1/completions", 500, "server_error"),
        ("/v1/responses", 500, "server_error"),
        ("/v1/messages", 500, "api_error"),
        ("/", 424, "generation"),
    ],
)
def test_an_answer_that_fails_is_an_error_in_the_dialects_shape(tiny_llama, path, status, kind):
    async def talk(http, engine, app):
        whole = await http.post(path, json=CALLS[path])
        expected = SHAPES.get(path, openai_shape)(kind, "the logits are not finite")
        assert (whole.status_code, whole.json()) == (status, expected)
        streamed = await http.post(path, json=CALLS[path] | {"stream": True})
        assert streamed.status_code == 200
        *events, (name, last) = events_of(streamed)
        assert events, "it had begun"
        if path == "/v1/responses":
            assert (name, last["type"], last["code"]) == ("error", "error", "server_error")
            assert (last["message"], last["sequence_number"]) == ("the logits are not finite", len(events))
        else:
            assert (name, last) == ("error" if path == "/v1/messages" else None, expected)

    with_app(talk, tiny_llama, BROKEN_CORE)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/chat/completions", 429, "rate_limit_error"),
        ("/v1/messages", 529, "overloaded_error"),
        ("/", 429, "overloaded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_overload_is_told_before_any_stream_begins(tiny_llama, path, status, kind, stream):
    async def talk(http, engine, app):
        body = CALLS[path] | {"stream": stream}
        answers = await asyncio.gather(*(http.post(path, json=body) for _ in range(2)))
        (refused,) = (answer for answer in answers if answer.status_code != 200)
        assert refused.status_code == status
        assert kind in refused.text
        assert int(refused.headers["retry-after"]) >= 1

    with_app(talk, tiny_llama, config=ServerConfig(gate=GateLimits(max_concurrent_requests=1)))
