"""An engine that computes prompts, and one that goes on with their answers: they tell what a single engine tells."""

import asyncio
import os
import signal
from typing import Any

import pytest

from tests.e2e.test_fleet import FLAGS, engines
from tests.e2e.test_killed_engine import Told, check_answers, make_bodies, read_tokens, tell_all
from tests.server.running import RunningServer, running_server
from tests.support.needs import needs_nixl
from tests.support.waiting import wait_until

NUM_STREAMS = 12
PULLED = 'penstock_block_transfers_total{what="pulled"}'


def bodies(first: int = 300) -> list[dict[str, Any]]:
    """Some of each kind, with prompts of which each is long and begins as no other one does."""
    return [
        body | {"prompt": [first + i] * 100 + body["prompt"], "max_tokens": min(body["max_tokens"], 50)}
        for i, body in enumerate(make_bodies()[:NUM_STREAMS])
    ]


@pytest.fixture(scope="module")
def expected() -> list[Told]:
    with running_server(*FLAGS) as server:
        return asyncio.run(tell_all(server, bodies()))


@pytest.mark.parametrize(("transfer", "ranks"), [("file", 1), pytest.param("nixl", 1, marks=needs_nixl), ("file", 2)])
def test_a_prefill_and_a_decode_engine_tell_what_one_engine_tells(
    expected: list[Told], transfer: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # as between machines
    flags = ("--engines", "2", "--prefill-engines", "1", "--kv-transfer", transfer, "--admin")
    if ranks > 1:
        flags += ("--tensor-parallel-size", str(ranks), "--threads", str(ranks))
    with running_server(*FLAGS, *flags) as server:
        assert [engine["role"] for engine in engines(server)] == ["decode", "prefill"]
        check_answers(asyncio.run(tell_all(server, bodies())), expected)
        wait_until(server.idle)
        told = server.metrics()
        assert told["penstock_fleet_requests_handed_on_total"] >= NUM_STREAMS / 2
        assert told[PULLED] >= NUM_STREAMS
        assert told['penstock_block_transfers_total{what="pulled_nixl"}'] == (told[PULLED] if transfer == "nixl" else 0)
        assert told['penstock_block_transfers_total{what="missed"}'] == 0
        for replica in (0, 1):
            check_answers(asyncio.run(disturbed(server, replica)), expected)


async def disturbed(server: RunningServer, replica: int) -> list[Told]:
    """All streams, while an engine is killed."""
    telling = asyncio.ensure_future(tell_all(server, bodies()))
    enough = await read_tokens(server) + 50
    while not telling.done() and await read_tokens(server) < enough:
        await asyncio.sleep(0.01)
    victim = next(one for one in await asyncio.to_thread(engines, server) if one["place"] == replica)
    os.kill(victim["pid"], signal.SIGKILL)
    return await telling
