"""An engine whose two ranks are on two nodes of a Ray cluster answers as one process does, and outlives both."""

import asyncio
import random
from collections.abc import Iterator

import psutil
import pytest

from penstock.config.ranks import RANK_PROCESS
from tests.e2e.test_fleet import FLAGS, bodies, engines
from tests.e2e.test_killed_engine import Told, check_answers, tell_all
from tests.e2e.test_ray import START_SECONDS, disturbed
from tests.server.running import RunningServer
from tests.support.ray_cluster import LocalCluster
from tests.support.waiting import alive, wait_until

RANKS = ("--tensor-parallel-size", "2", "--nodes-per-engine", "2", "--admin")


def rank_processes() -> list[psutil.Process]:
    """Of this test's cluster: its nodes are processes of this machine."""
    return [child for child in psutil.Process().children(recursive=True) if is_rank(child)]


def is_rank(process: psutil.Process) -> bool:
    try:
        return RANK_PROCESS in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


@pytest.fixture(scope="module")
def server(cluster: LocalCluster) -> Iterator[RunningServer]:
    server = RunningServer(*FLAGS, "--cluster", cluster.address, *RANKS)
    try:
        yield server.wait_until_listening(START_SECONDS)
    finally:
        pids = [engine["pid"] for engine in engines(server)] if server.process.poll() is None else []
        pids += [process.pid for process in rank_processes()]
        server.stop()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def restarts(server: RunningServer) -> float:
    return server.metrics()["penstock_engine_restarts_total"]


def test_an_engine_of_two_nodes_answers_bit_for_bit_as_one_process(server: RunningServer, expected: list[Told]) -> None:
    (rank,) = rank_processes()
    (engine,) = engines(server)
    assert psutil.Process(engine["pid"]).ppid() != rank.ppid(), "each is its host's child"
    check_answers(asyncio.run(tell_all(server, bodies())), expected)
    assert restarts(server) == 0


def test_streams_go_on_when_a_rank_s_node_is_lost(
    server: RunningServer, cluster: LocalCluster, expected: list[Told]
) -> None:
    of_engine = cluster.node_of(engines(server)[0]["node"])
    (of_rank,) = (node for node in cluster.nodes if node != of_engine)
    cluster.add_node()
    before = restarts(server)
    lose = disturbed(server, random.Random(1), lambda victim: cluster.lose_node(of_rank))
    check_answers(asyncio.run(lose), expected)
    assert restarts(server) == before + 1
