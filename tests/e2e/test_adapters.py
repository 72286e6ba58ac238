"""Sixteen adapters and the base in one load, in less memory than they take, while engines are killed: every answer is
the one that its request has alone.

`TEST_KILLS=20` for as many kills as one likes; the default keeps the suite short.
"""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock import LLM, SamplingParams, native
from tests.adapters import write_adapter
from tests.server.running import RunningServer, running_server
from tests.waiting import wait_until

KILLS = int(os.environ.get("TEST_KILLS", "2"))
SEED = int(os.environ.get("TEST_SEED", "1"))
ADAPTERS = 16
PROMPTS = ["the quick brown fox", "what is the sum of thirty seven and fifty eight", "a request that goes in"]
LOGPROB_NOISE = 1e-3 if native.library() is None else 0.0

Answer = tuple[list[float], str]


def params(index: int) -> dict[str, Any]:
    return {"max_tokens": 120 + index % 7, "temperature": 0.7 * (index % 2), "seed": index}


async def ask(client: openai.AsyncOpenAI, model: str, index: int) -> Answer:
    values: list[float] = []
    text = ""
    body = {"logprobs": 0, "stream": True, "extra_body": {"ignore_eos": True}, **params(index)}
    async for piece in await client.completions.create(model=model, prompt=PROMPTS[index % 3], **body):
        for choice in piece.choices:
            text += choice.text
            if choice.logprobs is not None:
                values += [value or 0.0 for value in choice.logprobs.token_logprobs or []]
    return values, text


async def kill(server: RunningServer) -> None:
    rng = random.Random(SEED)
    for _ in range(KILLS):
        await asyncio.sleep(rng.uniform(0.3, 1.0))
        restarts = server.metrics()["penstock_engine_restarts_total"]
        os.kill(server.engine_pid, signal.SIGKILL)
        while server.metrics()["penstock_engine_restarts_total"] == restarts:
            await asyncio.sleep(0.1)
        while server.metrics()['penstock_place_up{place="0"}'] == 0:
            await asyncio.sleep(0.1)


async def load(server: RunningServer, asked: list[tuple[str, int]]) -> list[Answer]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answers = asyncio.gather(*(ask(client, name, index) for name, index in asked))
        await kill(server)
        return await answers


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        f"a{seed}": write_adapter(folder / f"a{seed}", tiny_llama, seed=seed, rank=(4, 8, 16)[seed % 3], size=0.1)
        for seed in range(ADAPTERS)
    }


def test_each_answer_is_the_one_alone(tiny_llama: Path, folders: dict[str, Path]) -> None:
    names = ["tiny", *folders]
    asked = [(name, 2 * place + turn) for turn in range(2) for place, name in enumerate(names)]
    random.Random(SEED).shuffle(asked)
    listed = ",".join(f"{name}={path}" for name, path in folders.items())
    alone = []
    with LLM(str(tiny_llama), adapter=listed, threads=1, kv_cache_memory="16MiB") as llm:
        for name, index in asked:
            sampling = SamplingParams(ignore_eos=True, logprobs=0, **params(index))
            adapter = None if name == "tiny" else name
            made = llm.generate(PROMPTS[index % 3], sampling, adapter=adapter)[0].outputs[0]
            alone.append(([one.logprob for one in made.logprobs or []], made.text))
    flags = ["--model", str(tiny_llama), "--served-model-name", "tiny", "--threads", "1", "--kv-cache-memory", "8MiB"]
    with running_server(*flags, "--adapter", listed, "--adapter-memory", "600KiB") as server:
        answers = asyncio.run(load(server, asked))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:  # of an engine that nobody kills
            for name in names:
                client.completions.create(model=name, prompt=PROMPTS[0], max_tokens=1)
        wait_until(lambda: 0 < server.metrics()["penstock_adapters_loaded"] < ADAPTERS)
    for (values, text), (wanted, wanted_text) in zip(answers, alone, strict=True):
        assert values == pytest.approx(wanted, abs=LOGPROB_NOISE, rel=0)
        assert text == wanted_text
