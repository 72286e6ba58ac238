"""A server whose engine is two processes: one of them is killed, and nobody notices."""

import os
import signal
import tempfile
from pathlib import Path

import openai

from tests.server.running import running_server
from tests.support.waiting import alive, children, wait_until


def test_a_killed_rank_takes_the_engine_down_and_the_next_one_goes_on(tiny_llama: Path) -> None:
    body = {"prompt": [5], "n": 2, "max_tokens": 200, "seed": 1, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    flags = ("--model", str(tiny_llama), "--tensor-parallel-size", "2", "--kv-cache-memory", "8MiB")
    with running_server(*flags) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        undisturbed = client.completions.create(model=server.model, **body)
        engine = server.engine_pid
        (rank,) = children(engine)
        texts = [""] * 2
        for chunk in client.completions.create(model=server.model, **body, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            if len(texts[0]) > 5 and alive(rank):
                os.kill(rank, signal.SIGKILL)
        assert texts == [choice.text for choice in undisturbed.choices]
        # On a busy machine the answer may have been complete before the kill.
        wait_until(lambda: server.metrics()["penstock_engine_restarts_total"] == 1)
        (successor,) = children(server.engine_pid)
        assert not alive(engine)
        assert not any("Traceback" in line for line in server.log)
        assert sum("another rank of the engine has ended" in line for line in server.log) >= 1
    assert not alive(successor)
    assert not list(Path(tempfile.gettempdir()).glob(f"penstock-ranks-{engine}-*"))
