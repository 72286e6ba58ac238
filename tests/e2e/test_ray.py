"""Engines in a Ray cluster of two nodes, whose nodes, hosts and engines are killed under streams: nobody notices.

Expected is what a server with a single engine of its own tells. `TEST_KILLS=5` for as many nodes as one likes.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.test_fleet import FLAGS, bodies, engines
from tests.e2e.test_killed_engine import Told, check_answers, read_tokens, tell_all
from tests.server.running import RunningServer
from tests.support import fetch
from tests.support.ray_cluster import LocalCluster
from tests.support.waiting import alive, wait_until

KILLS = int(os.environ.get("TEST_KILLS", "1"))
SEED = int(os.environ.get("TEST_SEED", "1"))
START_SECONDS = 120.0


@pytest.fixture(scope="module")
def kv_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks") / "blocks"


@pytest.fixture(scope="module")
def server(cluster: LocalCluster, kv_disk: Path) -> Iterator[RunningServer]:
    flags = ("--cluster", cluster.address, "--engines", "2", "--admin", "--kv-disk", f"{kv_disk}:16MiB")
    server = RunningServer(*FLAGS, *flags)
    try:
        yield server.wait_until_listening(START_SECONDS)
    finally:
        pids = [engine["pid"] for engine in engines(server)] if server.process.poll() is None else []
        server.stop()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def all_up(server: RunningServer) -> bool:
    return [engine["state"] for engine in engines(server)] == ["up", "up"]


async def disturbed(server: RunningServer, rng: random.Random, disturb: Callable[[dict], None]) -> list[Told]:
    """What is told while something happens to one of the engines that have requests."""
    while True:
        telling = asyncio.ensure_future(tell_all(server, bodies()))
        victim = rng.choice(await asyncio.to_thread(engines, server))
        enough = await read_tokens(server) + rng.uniform(50, 400)
        while not telling.done() and await read_tokens(server) < enough:
            await asyncio.sleep(0.01)
        if not telling.done():  # else it was over before it was noticed
            await asyncio.to_thread(disturb, victim)
            return await telling


def test_each_engine_is_on_a_node_of_its_own(server: RunningServer, cluster: LocalCluster) -> None:
    nodes = {cluster.node_of(engine["node"]) for engine in engines(server)}
    assert len(nodes) == 2
    assert all(psutil.pid_exists(engine["pid"]) for engine in engines(server))


def test_nothing_listens_but_http_and_what_asks_for_keys(server: RunningServer) -> None:
    """Ray's own ports aside, which docs/scaling.md tells how to guard."""
    for engine in engines(server):
        assert not listening(engine["pid"]), "engines connect"
    others = [(host, port) for host, port in listening(server.process.pid) if port != httpx.URL(server.url).port]
    assert [mechanism for one in others if (mechanism := zmtp_mechanism(*one))] == ["CURVE", "CURVE"]


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process listens, as it can be connected to."""
    addresses = [
        connection.laddr
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    return [("127.0.0.1" if ip in ("0.0.0.0", "::") else ip.removeprefix("::ffff:"), port) for ip, port in addresses]


def zmtp_mechanism(host: str, port: int) -> str:
    """How who connects to a ZeroMQ socket has to prove who he is; empty if it is none (Ray's gRPC)."""
    with socket.create_connection((host, port), 60) as connection:
        connection.settimeout(60)
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00")
        greeting = b""
        with contextlib.suppress(ConnectionError):
            while len(greeting) < 32 and (greeting[:1] == b"\xff" or not greeting):
                more = connection.recv(64)
                greeting += more
                if not more:
                    break
    return greeting[12:32].rstrip(b"\0").decode() if greeting[:1] == b"\xff" else ""


def test_streams_go_on_when_a_node_is_lost_and_its_engine_starts_on_the_next_one(
    server: RunningServer, cluster: LocalCluster, kv_disk: Path, expected: list[Told]
) -> None:
    rng = random.Random(SEED)
    for _ in range(KILLS):
        check_answers(
            asyncio.run(disturbed(server, rng, lambda victim: cluster.lose_node(cluster.node_of(victim["node"])))),
            expected,
        )
        wait_until(lambda: not all_up(server))
        assert fetch.get(f"{server.url}/health/ready").status_code == 200
        cluster.add_node()
        wait_until(lambda: all_up(server), START_SECONDS)
    wait_until(server.idle)
    assert sorted(path.name for path in kv_disk.parent.iterdir()) == ["blocks", "blocks.1"], "each engine has a file"


@pytest.mark.parametrize("of", ["engine", "host"])
def test_streams_go_on_when_an_engine_or_its_host_is_killed(
    server: RunningServer, expected: list[Told], of: str
) -> None:
    def kill(victim: dict) -> None:
        process = psutil.Process(victim["pid"])
        os.kill(process.pid if of == "engine" else process.ppid(), signal.SIGKILL)

    restarts = server.metrics()["penstock_engine_restarts_total"]
    check_answers(asyncio.run(disturbed(server, random.Random(SEED), kill)), expected)
    wait_until(lambda: server.metrics()["penstock_engine_restarts_total"] > restarts, START_SECONDS)
    wait_until(lambda: all_up(server), START_SECONDS)
    assert server.metrics()["penstock_engine_restarts_total"] == restarts + 1
