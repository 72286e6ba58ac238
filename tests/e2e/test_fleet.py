"""Two real engines under streams, one of which is killed, drained or replaced: nobody notices.

Expected is what a server with a single engine tells. `TEST_KILLS=20` for as many kills as one likes.
"""

import asyncio
import os
import random
import signal

import httpx
import openai
import pytest

from tests.e2e.test_killed_engine import check_answers, make_bodies, read_tokens, tell_all
from tests.server.running import RunningServer, running_server
from tests.support import fetch
from tests.support.waiting import wait_until

KILLS = int(os.environ.get("TEST_KILLS", "2"))
SEED = int(os.environ.get("TEST_SEED", "1"))
FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-cache-memory", "64MiB")


def bodies():
    """A few of each kind: greedy, sampled, searched, n of 2, log-probabilities, JSON, stop strings."""
    return [body | {"max_tokens": min(body["max_tokens"], 80)} for body in make_bodies()[:24]]


@pytest.fixture(scope="module")
def fleet():
    with running_server(*FLAGS, "--engines", "2", "--admin") as server:
        yield server


def engines(server: RunningServer) -> list[dict]:
    return httpx.get(f"{server.url}/v1/admin/engines", timeout=60).json()["engines"]


def test_streams_of_two_engines_of_which_one_is_killed_again_and_again_tell_what_one_engine_tells(fleet, expected):
    rng = random.Random(SEED)

    def restarts() -> float:
        return fleet.metrics()["penstock_engine_restarts_total"]

    async def disturbed() -> None:
        kills = 0
        while kills < KILLS:
            telling = asyncio.ensure_future(tell_all(fleet, bodies()))
            enough = await read_tokens(fleet) + rng.uniform(50, 400)
            while not telling.done() and await read_tokens(fleet) < enough:
                await asyncio.sleep(0.01)
            if not telling.done():
                up = [one for one in await asyncio.to_thread(engines, fleet) if one["state"] == "up"]
                if len(up) == 2:
                    os.kill(rng.choice(up)["pid"], rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
                    kills += 1
            check_answers(await telling, expected)
            # A stopped engine looks up until its silence is noticed, perhaps after the last stream has ended.
            await asyncio.to_thread(wait_until, lambda wanted=kills: restarts() == wanted)

    asyncio.run(disturbed())
    wait_until(fleet.idle)
    wait_until(lambda: all(engine["state"] == "up" for engine in engines(fleet)))


def test_a_killed_engine_leaves_the_server_healthy_and_is_replaced(fleet):
    """Its replacement may be up before a health check, which waits for a sign of life, has ended."""
    victim, restarts = engines(fleet)[0], fleet.metrics()["penstock_engine_restarts_total"]
    os.kill(victim["pid"], signal.SIGKILL)

    def replaced() -> bool:
        answer = fetch.get(f"{fleet.url}/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        first = answer.json()["engines"][0]
        assert first["state"] == "up" or "killed by SIGKILL" in first["reason"]
        return fleet.metrics()["penstock_engine_restarts_total"] == restarts + 1 and first["state"] == "up"

    wait_until(replaced)
    assert engines(fleet)[0]["pid"] != victim["pid"]
    assert any("killed by SIGKILL" in line for line in fleet.log)
    assert fleet.metrics()['penstock_place_up{place="0"}'] == 1


def test_engines_are_drained_and_replaced_under_streams(fleet, expected):
    async def disturbed(change) -> None:
        telling = asyncio.ensure_future(tell_all(fleet, bodies()))
        begun = await read_tokens(fleet) + 100
        while await read_tokens(fleet) < begun:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(change)
        check_answers(await telling, expected)

    def drain() -> None:
        place = engines(fleet)[0]["place"]
        assert httpx.delete(f"{fleet.url}/v1/admin/engines/{place}", timeout=120).status_code == 200

    def reload_by_signal() -> None:
        fleet.process.send_signal(signal.SIGUSR1)

    asyncio.run(disturbed(drain))
    assert len(engines(fleet)) == 1
    old = engines(fleet)[0]["place"]
    asyncio.run(disturbed(reload_by_signal))
    wait_until(lambda: [engine["place"] for engine in engines(fleet)] == [old + 1])
    fleet.process.send_signal(signal.SIGTTIN)
    wait_until(lambda: len(engines(fleet)) == 2)
    fleet.process.send_signal(signal.SIGTTOU)
    wait_until(lambda: [engine["place"] for engine in engines(fleet)] == [old + 1])


def test_later_turns_of_a_chat_go_to_the_engine_that_has_the_earlier_ones(fleet):
    if len(engines(fleet)) == 1:
        assert httpx.post(f"{fleet.url}/v1/admin/engines", timeout=120).status_code == 200

    async def chat(client: openai.AsyncOpenAI, name: str) -> list[int]:
        text, cached = f"{name}: " + "one two three four five " * 20, []
        for turn in range(3):
            body = {"prompt": text, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
            answer = await client.completions.create(model=fleet.model, **body)
            text += answer.choices[0].text + f" and turn {turn}"
            cached.append(answer.usage.prompt_tokens_details.cached_tokens / answer.usage.prompt_tokens)
        return cached

    async def talk() -> list[list[int]]:
        base = f"{fleet.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=None) as client:
            return await asyncio.gather(*(chat(client, name) for name in "abcd"))

    for _, second, third in asyncio.run(talk()):
        assert second > 0.5
        assert third > 0.5
    hits = [value for name, value in fleet.metrics().items() if name.startswith("penstock_place_prefix_cache_hits")]
    assert sum(value > 0 for value in hits) >= 2, "both engines have work"
