"""The application over an engine that runs a rule, for failures that no healthy model shows. In one process."""

import asyncio
import json

import pytest

from penstock.errors import PenstockError
from penstock.frontend.input_processor import LONG_TEXT
from tests.engine.rule_core import BROKEN
from tests.server.in_process import with_app


def test_a_sequence_that_fails_in_mid_stream_is_an_error_event_and_fails_alone(tmp_path):
    async def talk(http, engine, app):
        body = {"model": "rule", "max_tokens": 5, "logprobs": 0}
        broken, fine = await asyncio.gather(
            http.post("/v1/completions", json=body | {"prompt": [BROKEN], "stream": True}),
            http.post("/v1/completions", json=body | {"prompt": [1]}),
        )
        events = broken.content.split(b"\n\n")
        assert json.loads(events[0][6:])["choices"][0]["logprobs"]["tokens"] == ["905"]
        assert json.loads(events[-2][6:])["error"]["message"] == "the logits are not finite"
        assert b"[DONE]" not in broken.content
        assert fine.json()["choices"][0]["logprobs"]["tokens"] == ["2", "3", "4", "5", "6"]

    with_app(talk, tmp_path)


def test_a_sequence_that_fails_fails_its_whole_answer(tmp_path):
    async def talk(http, engine, app):
        answer = await http.post("/v1/completions", json={"model": "rule", "prompt": [BROKEN]})
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "the logits are not finite",
            "type": "server_error",
            "param": None,
            "code": None,
        }

    with_app(talk, tmp_path)


@pytest.mark.parametrize("error", [PenstockError("known"), RuntimeError("not known")])
def test_whatever_escapes_a_route_is_answered_in_shape_and_with_an_id(tmp_path, error):
    async def talk(http, engine, app):
        @app.get("/broken")
        async def broken():
            raise error

        answer = await http.get("/broken")
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "not known" not in answer.text, "what went wrong inside is for the log"
        assert answer.headers["x-request-id"]

    with_app(talk, tmp_path)


def test_a_model_without_a_tokenizer_takes_token_ids_only(tmp_path):
    async def talk(http, engine, app):
        for path, body in (
            ("completions", {"prompt": "text"}),
            ("completions", {"prompt": [1], "echo": True}),
            ("chat/completions", {"messages": [{"role": "user", "content": "text"}]}),
        ):
            answer = await http.post(f"/v1/{path}", json={"model": "rule"} | body)
            assert answer.status_code == 400
            assert "tokenizer" in answer.json()["error"]["message"]

    with_app(talk, tmp_path)


def test_a_long_text_is_tokenised_beside_the_event_loop(tiny_llama):
    async def talk(http, engine, app):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticker = asyncio.ensure_future(tick())
        text = "the quick brown fox jumps over the lazy dog " * (100 * LONG_TEXT // 44)
        token_ids = await engine.prompts.encode(text)
        ticker.cancel()
        assert len(token_ids) > LONG_TEXT
        assert ticks > 5

    with_app(talk, tiny_llama)
