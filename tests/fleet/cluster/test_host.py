"""The parents of an engine's processes on the nodes of a cluster, without one."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from penstock.config.engine_config import ModelConfig
from penstock.config.ranks import RANK_PROCESS
from penstock.errors import ConfigError
from penstock.fleet.cluster import host
from penstock.fleet.cluster.host import NICENESS, RankHost, own_version
from penstock.fleet.cluster.secure import make_rendezvous
from tests.support.waiting import wait_until

TWO_RANKS = ModelConfig(tensor_parallel_size=2)


def test_the_parent_of_ranks_tells_which_one_ended(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks wait for the first one, which was never started."""
    monkeypatch.setattr(host, "this_node", lambda: "node 2")
    model = ModelConfig(str(tiny_llama), tensor_parallel_size=4)
    parent = RankHost(own_version(), make_rendezvous("127.0.0.1", num_nodes=2), model, node=1)
    told: list[str] = []
    waiting = threading.Thread(target=lambda: told.append(parent.one_ended()), daemon=True)
    waiting.start()
    started = list(parent._processes.items())
    assert [rank for rank, _ in started] == [2, 3]
    # Until it has its own program, a new process shows its parent's command.
    wait_until(lambda: all(RANK_PROCESS in psutil.Process(process.pid).cmdline() for _, process in started))
    assert not told
    started[1][1].kill()
    waiting.join(30)
    assert told == ["rank 3 of the engine, on node 2, was killed by SIGKILL"]
    for _, process in started:  # they end with their parent
        process.communicate(timeout=30)
    wait_until(lambda: not any(psutil.pid_exists(process.pid) for _, process in started))


def test_a_node_with_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has penstock .*, and the server 0\.0\.1: install the same"):
        RankHost("0.0.1", make_rendezvous("127.0.0.1", num_nodes=2), TWO_RANKS, node=1)


WORKER = """
import logging, os, subprocess, sys, threading
from penstock.fleet.cluster.host import leave_niceness
logging.basicConfig(format="%(message)s")
end = threading.Event()
threading.Thread(target=end.wait).start()
leave_niceness()
threads = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
child = subprocess.check_output([sys.executable, "-c", "import os; print(os.nice(0))"])
print(*threads, int(child))
end.set()
"""
"""Prints the niceness of its threads and of a child."""


def niceness_of_worker(**environment: str) -> tuple[list[int], str]:
    """What `WORKER` prints, and its log, if it starts with niceness 15."""
    done = subprocess.run(
        ["nice", "-n", "15", sys.executable, "-c", WORKER],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(one) for one in done.stdout.split()], done.stderr


def test_a_worker_leaves_ray_s_niceness_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NICENESS, raising=False)
    own = os.nice(0)
    niceness, logged = niceness_of_worker()
    if "start the node with RAY_worker_niceness=0" in logged:  # not permitted here
        assert niceness == [min(19, own + 15)] * 2
    else:
        assert niceness == [own, own]


def test_the_niceness_that_a_node_sets_for_its_workers_holds() -> None:
    niceness, logged = niceness_of_worker(**{NICENESS: "15"})
    assert niceness == [min(19, os.nice(0) + 15)] * 2
    assert not logged


def test_ranks_start_after_their_parent_has_left_ray_s_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(host, "leave_niceness", lambda: done.append("niceness left"))
    monkeypatch.setattr(host, "start_child", lambda module, line: done.append("rank started"))
    RankHost(own_version(), make_rendezvous("127.0.0.1", num_nodes=2), TWO_RANKS, node=1)
    assert done == ["niceness left", "rank started"]
