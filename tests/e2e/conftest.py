"""What several files of this folder share, as it takes long to start."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.test_fleet import FLAGS, bodies
from tests.e2e.test_killed_engine import Told, tell_all
from tests.server.running import running_server
from tests.support.ray_cluster import LocalCluster, local_cluster


@pytest.fixture(scope="session")
def expected() -> list[Told]:
    """What a server with a single engine tells."""
    with running_server(*FLAGS) as server:
        return asyncio.run(tell_all(server, bodies()))


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two nodes of one CPU each. Who loses one adds one."""
    with local_cluster(num_nodes=2) as cluster:
        yield cluster
