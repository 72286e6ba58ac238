"""An engine that computes prompts on one node of a Ray cluster, and one on another that goes on with their answers."""

import asyncio

from tests.e2e.test_fleet import FLAGS, engines
from tests.e2e.test_killed_engine import check_answers, tell_all
from tests.e2e.test_prefill_decode import NUM_STREAMS, PULLED, bodies
from tests.server.running import RunningServer, running_server
from tests.support.needs import needs_nixl
from tests.support.ray_cluster import LocalCluster
from tests.support.waiting import wait_until


@needs_nixl
def test_blocks_come_by_nixl_from_the_node_that_computed_them(cluster: LocalCluster) -> None:
    with running_server(*FLAGS) as server:
        expected = asyncio.run(tell_all(server, bodies()))
    prefill = ("--engines", "2", "--prefill-engines", "1", "--kv-transfer", "nixl")
    server = RunningServer(*FLAGS, "--cluster", cluster.address, "--admin", *prefill)
    try:
        server.wait_until_listening(120.0)
        assert [engine["role"] for engine in engines(server)] == ["decode", "prefill"]
        assert len({cluster.node_of(engine["node"]) for engine in engines(server)}) == 2
        check_answers(asyncio.run(tell_all(server, bodies())), expected)
        wait_until(server.idle)
        told = server.metrics()
        assert told['penstock_block_transfers_total{what="pulled_nixl"}'] == told[PULLED] >= NUM_STREAMS
    finally:
        server.stop()
