"""64 open streams, and an engine that is killed and stopped at random moments: nobody notices.

`TEST_KILLS=20` for as many kills as one likes; the default keeps the suite short.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types import Completion

from penstock import native
from penstock.checkpoint.checkpoint import DEMO_FOLDER
from penstock.text.tokenizer import Tokenizer
from tests.e2e.crowd import make_visitors
from tests.server.running import RunningServer, running_server
from tests.support.waiting import wait_until

KILLS = int(os.environ.get("TEST_KILLS", "2"))
SEED = int(os.environ.get("TEST_SEED", "1"))
MAX_TOKENS = 80 + 40 * KILLS
"""So that one round has room for most kills, if not for all."""

LOGPROB_NOISE = 1e-3 if native.library() is None else 0.0
"""The reference kernels are not the same to the last bit in every batch; the native ones are."""

Told = dict[int, tuple[str, list[str], list[float], str | None]]
"""What a stream told of each of its answers: text, tokens, log-probabilities and finish reason."""


def make_bodies() -> list[dict[str, Any]]:
    """Greedy, sampled and searched, one answer or two, with and without log-probabilities, of a few the prompt's, too;
    a few end by a stop string, and a few are numbers in JSON.
    """
    visitors = make_visitors(Tokenizer.from_path(DEMO_FOLDER), seed=3)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": visitor.prompt[:200],
            "temperature": visitor.params.temperature,
            "seed": i,
            "n": 2 if i % 8 == 5 else 1,
            "logprobs": 2 if i % 4 == 1 else None,
            "echo": i % 8 == 1,
            "stop": ["\n7"] if i % 5 == 2 else None,
            "max_tokens": MAX_TOKENS - i,
            "extra_body": {"ignore_eos": i % 3 > 0, "min_tokens": 20 * (i % 2)},
        }
        for i, visitor in enumerate(visitors)
    ]
    numbers = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 9}, "minItems": 40}
    for body in bodies[5::16]:
        body["extra_body"] |= {"structured_outputs": {"json": numbers}}
    for body in bodies[::20]:
        body |= {"temperature": 0, "n": 2, "logprobs": 1, "extra_body": {"num_beams": 3}, "stop": None}
    return bodies


async def chunks_of(client: openai.AsyncOpenAI, model: str, body: dict[str, Any]) -> AsyncIterator[Completion]:
    """The answer, in pieces where it can be had so."""
    if "num_beams" in body["extra_body"]:
        yield await client.completions.create(model=model, **body)
        return
    async for chunk in await client.completions.create(model=model, stream=True, **body):
        yield chunk


async def tell(client: openai.AsyncOpenAI, model: str, body: dict[str, Any]) -> Told:
    told: Told = {}
    async for chunk in chunks_of(client, model, body):
        for choice in chunk.choices:
            text, tokens, logprobs, reason = told.get(choice.index, ("", [], [], None))
            assert reason is None, "an answer goes on after its end"
            if choice.logprobs is not None:
                tokens = tokens + (choice.logprobs.tokens or [])
                logprobs = logprobs + [logprob or 0.0 for logprob in choice.logprobs.token_logprobs or []]
            told[choice.index] = (text + choice.text, tokens, logprobs, choice.finish_reason)
    return told


async def tell_all(server: RunningServer, bodies: list[dict[str, Any]]) -> list[Told]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=None) as client:
        return await asyncio.gather(*(tell(client, server.model, body) for body in bodies))


async def read_tokens(server: RunningServer) -> float:
    return (await asyncio.to_thread(server.metrics))["penstock_generation_tokens_total"]


def check_answers(answers: list[Told], expected: list[Told]) -> None:
    for i, (answer, undisturbed) in enumerate(zip(answers, expected, strict=True)):
        assert answer.keys() == undisturbed.keys()
        for index, (text, tokens, logprobs, reason) in answer.items():
            assert (text, tokens, reason) == undisturbed[index][:2] + undisturbed[index][3:], f"stream {i}"
            assert logprobs == pytest.approx(undisturbed[index][2], rel=0, abs=LOGPROB_NOISE), f"stream {i}"


def test_64_streams_through_an_engine_that_is_killed_tell_what_they_tell_undisturbed() -> None:
    bodies = make_bodies()
    rng = random.Random(SEED)

    async def disturbed(server: RunningServer, total: float, kills_left: int) -> tuple[list[Told], int]:
        """One round of all streams, and how many kills are left after it."""
        telling = asyncio.ensure_future(tell_all(server, bodies))
        while kills_left > 0 and not telling.done():
            if rng.random() < 0.8:  # by what it has done: how long that takes is another matter from run to run
                enough = await read_tokens(server) + rng.uniform(1, total / KILLS / 2)
                while not telling.done() and await read_tokens(server) < enough:
                    await asyncio.sleep(0.02)
            else:  # perhaps while it starts
                await asyncio.sleep(rng.uniform(0.0, 1.0))
            for pid in server.children() if not telling.done() else ():
                os.kill(pid, signal.SIGKILL if rng.random() < 0.75 else signal.SIGSTOP)
                kills_left -= 1
        return await telling, kills_left

    with running_server("--dtype", "float32", "--threads", "1") as server:
        expected = asyncio.run(tell_all(server, bodies))
        total, kills_left = asyncio.run(read_tokens(server)), KILLS
        while kills_left > 0:  # a client that is slower than the engine learns too late of a round's progress
            answers, kills_left = asyncio.run(disturbed(server, total, kills_left))
            check_answers(answers, expected)
        restarts = server.metrics()["penstock_engine_restarts_total"]
        assert 0 < restarts <= KILLS
        print(f"{restarts:.0f} engines died")
        wait_until(server.idle)
