"""Sixteen adapters and the base in one load, in less memory than they take, while engines are killed: every answer is
the one that its request has alone.
Requests in a journal go on with their adapters when the server is killed, too.

`TEST_KILLS=20` for as many kills as one likes; the default keeps the suite short.
"""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock import LLM, SamplingParams, native
from penstock.api.request import CompletionOutput
from tests.server.running import RunningServer, running_server
from tests.support.adapters import write_adapter
from tests.support.waiting import wait_until

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


CHANGED = "changed"
"""An adapter whose files change while the server is down: its answer must not end before."""
LONG = 480
Named = tuple[str, str, int]
"""A request's id, its model and its number."""


async def ask_for_whole(http: httpx.AsyncClient, one: Named) -> bool:
    """Ask for an answer in one piece; whether it came."""
    name, model, index = one
    body = {"model": model, "prompt": PROMPTS[index % 3], "ignore_eos": True, **params(index)}
    if model == CHANGED:
        body["max_tokens"] = LONG
    try:
        await http.post("/v1/completions", json=body, headers={"x-request-id": name})
    except httpx.TransportError:
        return False
    return True


async def answer_of(http: httpx.AsyncClient, name: str) -> dict[str, Any] | None:
    """What the journal has of a request's answer; None: the request is not known yet."""
    call = await http.get(f"/v1/requests/{name}")
    return None if call.status_code == 404 else call.json() | call.json()["prompts"][0]["answers"][0]


async def begin_and_kill(server: RunningServer, asked: list[Named]) -> None:
    """Kill both processes once each request has tokens. That of `CHANGED`, the last, begins when others have theirs:
    it must not have ended.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as http:
        calls = []
        for together in (asked[:-1], asked[-1:]):
            calls += [asyncio.ensure_future(ask_for_whole(http, one)) for one in together]
            for name, _, _ in together:
                while not ((answer := await answer_of(http, name)) and answer["token_ids"]):
                    await asyncio.sleep(0.01)
        for pid in (*server.children(), server.process.pid):
            os.kill(pid, signal.SIGKILL)
        ended = {model for (_, model, _), came in zip(asked, await asyncio.gather(*calls), strict=True) if came}
        assert CHANGED not in ended, "the answer came before the kill: ask for a longer one"


async def results(server: RunningServer, asked: list[Named]) -> list[dict[str, Any]]:
    found = []
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for name, _, _ in asked:
            while not ((answer := await answer_of(http, name)) and answer["finished"]):
                await asyncio.sleep(0.05)
            found.append(answer)
    return found


def listing(folders: dict[str, Path]) -> str:
    return ",".join(f"{name}={path}" for name, path in folders.items())


Alone = dict[tuple[str, int], CompletionOutput]


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, folders: dict[str, Path]) -> Alone:
    """The answer to each model's two requests, each asked alone."""
    made = {}
    with LLM(str(tiny_llama), adapter=listing(folders), threads=1, kv_cache_memory="16MiB") as llm:
        for place, name in enumerate(["tiny", *folders]):
            for index in (2 * place, 2 * place + 1):
                sampling = SamplingParams(ignore_eos=True, logprobs=0, **params(index))
                adapter = None if name == "tiny" else name
                (output,) = llm.generate(PROMPTS[index % 3], sampling, adapter=adapter)
                made[name, index] = output.outputs[0]
    return made


def test_no_answer_changes_though_engines_are_killed_nor_in_a_journal_though_the_server_is(
    tiny_llama: Path, folders: dict[str, Path], alone: Alone, tmp_path: Path
) -> None:
    changed = write_adapter(tmp_path / "changed", tiny_llama, seed=77)
    flags = ["--model", str(tiny_llama), "--served-model-name", "tiny", "--threads", "1", "--kv-cache-memory", "8MiB"]
    flags += ["--adapter", listing(folders | {CHANGED: changed}), "--adapter-memory", "600KiB"]
    flags += ["--journal", str(tmp_path / "journal")]
    asked = list(alone)
    random.Random(SEED).shuffle(asked)
    journaled = [(f"{name}-{index}", name, index) for name, index in [*alone][:6]] + [("changed-0", CHANGED, 0)]
    first = RunningServer(*flags)
    try:
        answers = asyncio.run(load(first.wait_until_listening(), asked))
        asyncio.run(begin_and_kill(first, journaled))
    finally:
        first.stop()
    for one, (values, text) in zip(asked, answers, strict=True):
        wanted = [entry.logprob for entry in alone[one].logprobs or []]
        assert values == pytest.approx(wanted, abs=LOGPROB_NOISE, rel=0), one
        assert text == alone[one].text, one

    write_adapter(changed, tiny_llama, seed=78)
    with running_server(*flags) as second:
        *found, refused = asyncio.run(results(second, journaled))
        with openai.OpenAI(base_url=f"{second.url}/v1", api_key="none") as client:  # whose engine is not killed
            for name in ("tiny", *folders):
                client.completions.create(model=name, prompt=PROMPTS[0], max_tokens=1)
        wait_until(lambda: 0 < second.metrics()["penstock_adapters_loaded"] < ADAPTERS)
    for (_, name, index), answer in zip(journaled, found, strict=False):
        assert answer["token_ids"] == list(alone[name, index].token_ids), (name, index)
    assert refused["finish_reason"] == "error"
    assert "the files of the adapter 'changed'" in refused["error"]
