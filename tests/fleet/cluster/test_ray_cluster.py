"""The connection to a Ray cluster, where no cluster is needed to show it; `tests/e2e/test_ray.py` has one."""

import asyncio
import socket
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from penstock.config.engine_config import EngineConfig
from penstock.errors import ConfigError
from penstock.fleet.cluster import ray_cluster
from penstock.fleet.cluster.host import End
from penstock.fleet.cluster.ray_cluster import Placed, RayCluster, RayLink, RemoteStep
from penstock.fleet.cluster.secure import SecureListener


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]'"):
        RayCluster("auto", {"CPU": 1})


def test_where_nobody_listens_it_is_told_at_once_and_how_to_mend_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match=r"no Ray cluster answers at .* refused.*ray start --head"):
            RayCluster(f"127.0.0.1:{taken.getsockname()[1]}", {"CPU": 1})


def test_a_host_is_asked_for_the_size_of_a_step_only_while_nothing_is_heard(monkeypatch):
    now, asked = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    step = RemoteStep(lambda: asked.append(now[0]))
    assert (step.num_tokens(), asked) == (0, [])
    now[0] += 3
    assert (step.num_tokens(), step.num_tokens(), asked) == (0, 0, [103.0])
    step.set_tokens(512)
    assert step.num_tokens() == 512
    step.heard()
    assert (step.num_tokens(), asked) == (0, [103.0])
    assert step.request_indices() is None


class Call:
    """A method of an actor. It has returned, or does when `answer` is set."""

    def __init__(self, *returned, called=lambda: None):
        self.answer, self._called = Future(), called
        for value in returned:
            self.answer.set_result(value)

    def remote(self, *arguments):
        self._called()
        return SimpleNamespace(future=lambda: self.answer)


class PretendedCluster:
    """Has placed an engine."""

    nodes_per_engine, resources = 2, {"CPU": 1.0}

    def __init__(self, host, *others):
        self.listener = SecureListener("127.0.0.1")
        self._placed = Placed(None, host, others)

    def place(self, launch):
        return self._placed

    def give_back(self, placed):
        assert placed is self._placed

    def submit(self, call):
        done = Future()
        done.set_result(call())
        return done


def ended(cluster, act=lambda link: None):
    """The link to an engine that has ended, and the exit code."""

    async def run():
        link = RayLink(cluster, EngineConfig(), "no:core")
        await link.placed()
        act(link)
        code = await asyncio.wait_for(link.exited(), 30)
        link.destroy()
        return link, code

    try:
        return asyncio.run(run())
    finally:
        cluster.listener.close()


def test_an_engine_whose_host_does_not_answer_is_given_up(monkeypatch):
    """As it hangs, on a node that does: its requests must go on elsewhere."""
    monkeypatch.setattr(ray_cluster, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(ray_cluster, "LAST_WORDS_SECONDS", 0.1)
    host = SimpleNamespace(whereabouts=Call(("node 1", 7)), exited=Call(), kill=Call())
    link, code = ended(PretendedCluster(host), RayLink.kill)
    assert (code, link.was_lost, link.last_words().message) == (-9, True, "its host on node 1 does not answer")


def test_an_engine_that_is_cut_off_and_slow_to_end_is_ended_by_its_host(monkeypatch):
    """As torch takes its time to leave: what it died of is known all the same, which it is not of a lost node."""

    async def at_once(link):
        return None

    monkeypatch.setattr(RayLink, "_cut", at_once)
    exited = Call()
    kill = Call(called=lambda: exited.answer.set_result(End(-9, False, [2], b"")))
    host = SimpleNamespace(whereabouts=Call(("node 1", 7)), exited=exited, kill=kill)
    link, code = ended(PretendedCluster(host))
    assert (code, link.was_lost, link.in_flight.request_indices()) == (-9, False, [2])
    host = SimpleNamespace(whereabouts=Call(("node 1", 7)), exited=Call(), kill=Call())
    link, code = ended(PretendedCluster(host))
    assert (code, link.was_lost, link.in_flight.request_indices()) == (-9, True, None)
    assert "the connection to it broke" in link.last_words().message


def test_an_engine_is_ended_when_a_rank_on_another_node_has(monkeypatch):
    monkeypatch.setattr(ray_cluster, "LAST_WORDS_SECONDS", 0.2)
    exited = Call()
    kill = Call(called=lambda: exited.answer.set_result(End(-9, False, [0], b"")))
    host = SimpleNamespace(whereabouts=Call(("node 1", 7)), exited=exited, kill=kill)
    other = SimpleNamespace(one_ended=Call("rank 1 of the engine, on node 2, was killed by SIGKILL"))
    link, code = ended(PretendedCluster(host, other))
    assert (code, link.was_lost, link.in_flight.request_indices()) == (-9, False, [0])
    assert "rank 1 of the engine" in link.last_words().message


def test_an_engine_that_fails_for_want_of_a_rank_says_so_itself():
    exited = Call(End(1, False, [3], b""))
    host = SimpleNamespace(whereabouts=Call(("node 1", 7)), exited=exited, kill=Call(called=lambda: 1 / 0))
    other = SimpleNamespace(one_ended=Call("rank 1 is gone"))
    link, code = ended(PretendedCluster(host, other))
    assert (code, link.in_flight.request_indices()) == (1, [3])
