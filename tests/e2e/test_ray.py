"""Engines in a Ray cluster of two nodes, whose nodes, hosts and engines are killed under streams: nobody notices.

Expected is what a server with a single engine of its own tells. `TEST_KILLS=5` for as many nodes as one likes.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests.e2e.test_fleet import FLAGS, bodies, engines
from tests.e2e.test_killed_engine import Told, check_answers, read_tokens, tell_all
from tests.ray_cluster import LocalCluster, local_cluster
from tests.server.running import RunningServer, running_server
from tests.waiting import alive, wait_until

KILLS = int(os.environ.get("TEST_KILLS", "1"))
SEED = int(os.environ.get("TEST_SEED", "1"))
START_SECONDS = 120.0


@pytest.fixture(scope="module")
def expected() -> list[Told]:
    with running_server(*FLAGS) as server:
        return asyncio.run(tell_all(server, bodies()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(num_nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: LocalCluster) -> Iterator[RunningServer]:
    server = RunningServer(*FLAGS, "--cluster", cluster.address, "--engines", "2", "--admin")
    try:
        yield server.wait_until_listening(START_SECONDS)
    finally:
        pids = [one["pid"] for one in engines(server)] if server.process.poll() is None else []
        server.stop()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def all_up(server: RunningServer) -> bool:
    return [one["state"] for one in engines(server)] == ["up", "up"]


async def disturbed(server: RunningServer, rng: random.Random, disturb: Callable[[dict], None]) -> list[Told]:
    """What is told while something happens to one of the engines that have requests."""
    telling = asyncio.ensure_future(tell_all(server, bodies()))
    enough = await read_tokens(server) + rng.uniform(50, 400)
    while await read_tokens(server) < enough:
        assert not telling.done()
        await asyncio.sleep(0.01)
    victim = rng.choice(await asyncio.to_thread(engines, server))
    await asyncio.to_thread(disturb, victim)
    return await telling


def test_each_engine_is_on_a_node_of_its_own(server: RunningServer, cluster: LocalCluster) -> None:
    nodes = {cluster.node_of(one["node"]) for one in engines(server)}
    assert len(nodes) == 2
    assert all(psutil.pid_exists(one["pid"]) for one in engines(server))


def test_streams_go_on_when_a_node_is_lost_and_its_engine_starts_on_the_next_one(
    server: RunningServer, cluster: LocalCluster, expected: list[Told]
) -> None:
    rng = random.Random(SEED)
    for _ in range(KILLS):
        check_answers(
            asyncio.run(disturbed(server, rng, lambda victim: cluster.lose_node(cluster.node_of(victim["node"])))),
            expected,
        )
        wait_until(lambda: not all_up(server))
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        cluster.add_node()
        wait_until(lambda: all_up(server), START_SECONDS)
    wait_until(server.idle)


@pytest.mark.parametrize("of", ["engine", "host"])
def test_streams_go_on_when_an_engine_or_its_host_is_killed(
    server: RunningServer, expected: list[Told], of: str
) -> None:
    def kill(victim: dict) -> None:
        process = psutil.Process(victim["pid"])
        os.kill(process.pid if of == "engine" else process.ppid(), signal.SIGKILL)

    restarts = server.metrics()["penstock_engine_restarts_total"]
    check_answers(asyncio.run(disturbed(server, random.Random(SEED), kill)), expected)
    wait_until(lambda: server.metrics()["penstock_engine_restarts_total"] == restarts + 1, START_SECONDS)
    wait_until(lambda: all_up(server), START_SECONDS)
