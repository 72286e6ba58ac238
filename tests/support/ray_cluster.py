"""A Ray cluster of several nodes on this machine, as small as they can be, with nodes that can be lost."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

OBJECT_STORE_BYTES = 75 << 20
"""The least that Ray takes."""

PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_worker_niceness": "0",
}
"""What Ray's processes inherit from their node: a slow machine is no failure, and workers do not starve."""


class LocalCluster:
    """A head without CPUs, and nodes of one CPU each. No node has a dashboard."""

    def __init__(self, num_nodes: int, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        self._least = {
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "include_log_monitor": False,
        }
        alone = {"num_cpus": 0, "no_monitor": "autoscaling_config" not in head}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in PATIENCE.items():
                patch.setenv(name, value)
            self._cluster = Cluster(initialize_head=True, head_node_args=alone | self._least | head)
        self.address: str = self._cluster.address
        self._nodes: dict[str, Any] = {}
        for _ in range(num_nodes):
            self.add_node()

    def add_node(self) -> str:
        """Another machine, as far as Ray is concerned; its id."""
        node = self._cluster.add_node(wait=False, num_cpus=1, **self._least)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    @property
    def nodes(self) -> list[str]:
        """Ids of those that are there, but for the head."""
        return list(self._nodes)

    def lose_node(self, node_id: str) -> None:
        """Every process of a node is killed in one moment, as by a power cut."""
        node = self._nodes.pop(node_id)
        roots = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
        lost = [one for root in roots for one in (root, *root.children(recursive=True))]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees another one's end
            for process in lost:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        with contextlib.suppress(Exception):  # it looks for what is dead already
            self._cluster.remove_node(node, allow_graceful=False)

    def node_of(self, shown: str) -> str:
        """The id of the node that `/v1/admin/engines` shows."""
        beginning = shown.rpartition("/")[2]
        (node_id,) = (node for node in self._nodes if node.startswith(beginning))
        return node_id

    def close(self) -> None:
        """Kill all that is left."""
        for node_id in list(self._nodes):
            self.lose_node(node_id)
        self._cluster.shutdown()


@contextlib.contextmanager
def local_cluster(num_nodes: int, **head: Any) -> Iterator[LocalCluster]:
    cluster = LocalCluster(num_nodes, **head)
    try:
        yield cluster
    finally:
        cluster.close()
