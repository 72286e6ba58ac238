"""The connection to a Ray cluster, where no cluster is needed to show it; `tests/e2e/test_ray.py` has one."""

import socket
import sys

import pytest

from penstock.errors import ConfigError
from penstock.frontend.cluster.ray_cluster import RayCluster, RemoteStep


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[ray\]'"):
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
    step.tokens_told(512)
    assert step.num_tokens() == 512
    step.heard()
    assert (step.num_tokens(), asked) == (0, [103.0])
    assert step.request_indices() is None
