"""`GET /debug/live`."""

import asyncio
import json

from penstock.core.plan import StepTrace
from penstock.engine.info import StepRecord
from penstock.errors import ShuttingDownError
from penstock.server.keys import load_keys
from penstock.server.live import LiveFeed
from tests.server.in_process import with_app

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


def test_the_feed_has_each_step_once_and_requests_until_they_have_ended(tiny_llama):
    async def talk(http, engine, app):
        feed = LiveFeed(lambda: [engine], lambda: False)
        before = feed.changes()
        assert (before["steps"], before["requests"]) == ([], [])
        answer = (await http.post("/v1/chat/completions", json=CHAT)).json()
        for began in (1.0, 2.0):
            engine.history.record_step(StepRecord(began, 0.1, 0.5, 0.1, StepTrace(num_tokens=1)))
        news = feed.changes()
        (record,) = news["requests"]
        assert record.ended is not None
        assert record.num_generated == answer["usage"]["completion_tokens"]
        assert [step.began for step in news["steps"]] == [1.0, 2.0]
        assert news["metrics"]["generation_tokens"] == {"": record.num_generated}
        after = feed.changes()
        assert (after["steps"], after["requests"]) == ([], [])

    with_app(talk, tiny_llama)


def test_the_stream_is_for_operators_and_ends_when_the_server_drains(tiny_llama, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[key]]\nname = "user"\nsecret = "sk-user"\n[[key]]\nname = "op"\nsecret = "sk-op"\noperator = true\n'
    )

    async def talk(http, engine, app):
        refused = await http.get("/debug/live", headers={"authorization": "Bearer sk-user"})
        assert refused.status_code == 403
        assert "operator" in refused.text
        asyncio.get_running_loop().call_later(0.3, engine.refuse, ShuttingDownError("the server is shutting down"))
        answer = await http.get("/debug/live", headers={"authorization": "Bearer sk-op"})
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
        assert events[0]["now"] < events[1]["now"]

    with_app(talk, tiny_llama, keys=load_keys(None, str(keys), private_cache=False))
