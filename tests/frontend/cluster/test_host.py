"""The parents of an engine's processes on the nodes of a cluster, without one."""

import threading
from pathlib import Path

import psutil
import pytest

from penstock.errors import ConfigError
from penstock.frontend.cluster import host
from penstock.frontend.cluster.host import RankHost, own_version
from penstock.frontend.cluster.secure import make_meeting
from penstock.ranks import RANK_PROCESS
from tests.waiting import wait_until


def test_the_parent_of_ranks_tells_which_one_ended(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks wait for the first one, which was never started."""
    monkeypatch.setattr(host, "this_node", lambda: "node 2")
    parent = RankHost(own_version(), make_meeting("127.0.0.1", num_nodes=2), str(tiny_llama), node=1, num_ranks=4)
    told: list[str] = []
    waiting = threading.Thread(target=lambda: told.append(parent.one_ended()), daemon=True)
    waiting.start()
    started = list(parent._processes.items())
    assert [rank for rank, _ in started] == [2, 3]
    assert all(RANK_PROCESS in psutil.Process(process.pid).cmdline() for _, process in started)
    assert not told
    started[1][1].kill()
    waiting.join(30)
    assert told == ["rank 3 of the engine, on node 2, was killed by SIGKILL"]
    for _, process in started:  # they end with their parent
        process.communicate(timeout=30)
    wait_until(lambda: not any(psutil.pid_exists(process.pid) for _, process in started))


def test_a_node_with_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has penstock .*, and the server 0\.0\.1: install the same"):
        RankHost("0.0.1", make_meeting("127.0.0.1", num_nodes=2), None, node=1, num_ranks=2)
