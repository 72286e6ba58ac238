"""Parent processes of an engine on a cluster node: Ray actors that start its processes, watch them and end with them.

The server creates the actors. An actor ends with the server, with its node, or on request, and its engine ends with it.
An engine on several nodes has an actor on each: an `EngineHost` on the first, a `RankHost` on the others.
"""

import contextlib
import logging
import os
import socket
import time
from dataclasses import replace
from importlib import metadata

import msgspec

from penstock.config.engine_config import EngineConfig, ModelConfig
from penstock.config.ranks import RANK_PROCESS, RankJoin, Ranks, Rendezvous
from penstock.dataclass import dataclass
from penstock.engine import protocol
from penstock.engine.protocol import Launch
from penstock.errors import ConfigError
from penstock.fleet.cluster.secure import make_rendezvous
from penstock.fleet.engine_process import EngineProcess
from penstock.fleet.link import describe_exit
from penstock.system.host import free_memory, start_child

log = logging.getLogger(__name__)

NICENESS = "RAY_worker_niceness"
NODE_ID_SHOWN = 12
RANKS_CHECK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class End:
    """How an engine process ended, as its parent saw it."""

    code: int
    was_stopped: bool
    request_indices: list[int] | None
    last_words: bytes


class EngineHost:
    """Starts and watches one engine process.

    The constructor runs in the actor's main thread, so the engine lives as long as the actor.
    """

    def __init__(self, version: str, launch: bytes, num_cpus: float, num_nodes: int) -> None:
        """
        Args:
            version: of the server's package.
            launch: launch options of the engine; its folder is filled in here.
            num_cpus: CPUs of this node that are reserved for the engine.
            num_nodes: nodes of the engine; this one runs rank 0.

        Raises:
            ConfigError: this node has another version of the package, or no room for the folder.
            EngineDeadError: the process cannot be started.
        """
        _check_version(version)
        leave_niceness()
        order = protocol.decode_launch(launch)
        config = share_memory(order.config, num_cpus, cpus_of_this_node(), num_nodes)
        if num_nodes > 1:
            config = replace(config, rendezvous=make_rendezvous(address_of_this_node(), num_nodes))
        self._rendezvous = config.rendezvous
        self._process = EngineProcess(lambda folder: msgspec.structs.replace(order, folder=folder, config=config))

    def whereabouts(self) -> tuple[str, int]:
        """The node (its address and the beginning of its Ray id) and the engine's process id."""
        return this_node(), self._process.pid

    def rendezvous(self) -> Rendezvous | None:
        """The address that ranks on other nodes connect to; None if the engine has a single node."""
        return self._rendezvous

    def num_tokens(self) -> int:
        """Tokens of the engine's current step."""
        return self._process.in_flight.num_tokens()

    def exited(self) -> End:
        """Wait for the engine's end."""
        code, in_flight = self._process.wait(), self._process.in_flight
        end = End(code, self._process.was_stopped, in_flight.request_indices(), in_flight.last_words())
        self._process.remove_folder()
        return end

    def kill(self) -> None:
        """End the engine at once."""
        self._process.kill()


class RankHost:
    """Starts and watches an engine's ranks on one of its further nodes. They live as long as the actor."""

    def __init__(self, version: str, rendezvous: Rendezvous, model: ModelConfig, node: int) -> None:
        """
        Args:
            version: of the server's package.
            model: the model as the user named it, and the number of ranks that divide it.
            node: index of this node among the engine's nodes.

        Raises:
            ConfigError: this node has another version of the package.
        """
        _check_version(version)
        leave_niceness()
        size = model.tensor_parallel_size
        self._processes = {
            rank: start_child(
                RANK_PROCESS,
                RankJoin(
                    rendezvous, model.model, Ranks(rank, size), model.revision, model.hf_overrides, model.mmproj
                ).encode(),
            )
            for rank in rendezvous.of_node(node, size)
        }

    def one_ended(self) -> str:
        """Wait until a rank ends unexpectedly; returns which one and how, as text."""
        while True:
            for rank, process in self._processes.items():
                if code := process.poll():
                    where = f"rank {rank} of the engine, on {this_node()},"
                    return f"{where} {describe_exit(code)}{'; its log in Ray says why' * (code > 0)}"
            time.sleep(RANKS_CHECK_SECONDS)


def _check_version(version: str) -> None:
    if version != own_version():
        raise ConfigError(
            f"node {socket.gethostname()} has penstock {own_version()}, and the server {version}: install the same"
        )


def own_version() -> str:
    """Version of the package that is installed here."""
    return metadata.version("penstock")


def leave_niceness() -> None:
    """Give this process, a worker of Ray, and those it starts the priority of its node's raylet.

    Ray starts workers with niceness 15: beside any other work of the node they would get a few percent of a core.
    `RAY_worker_niceness` in the node's environment is obeyed. A warning is logged where the system refuses.
    """
    wanted, niceness = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (os.getppid(), 0))
    if NICENESS in os.environ or niceness <= wanted:
        return
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), wanted)
    except PermissionError:
        log.warning(
            "engines run with niceness %d here, as workers of Ray do, and are slow beside other processes: start the "
            "node with %s=0 in its environment",
            niceness,
            NICENESS,
        )


def share_memory(config: EngineConfig, num_cpus: float, of: float, num_nodes: int = 1) -> EngineConfig:
    """Limit an engine's memory plan to the share of its nodes' free memory that its CPUs are of the nodes' CPUs.

    The nodes are assumed to be alike.
    """
    part = num_cpus / of if 0 < num_cpus < of else 1.0
    if config.cache.max_memory is not None or (part == 1.0 and num_nodes == 1):
        return config
    return replace(config, cache=replace(config.cache, max_memory=int(free_memory() * part) * num_nodes))


def this_node() -> str:
    """This node's name: its address and the beginning of its Ray id."""
    import ray

    return f"{address_of_this_node()}/{ray.get_runtime_context().get_node_id()[:NODE_ID_SHOWN]}"


def address_of_this_node() -> str:
    """This node's address in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def cpus_of_this_node() -> float:
    """Number of CPUs that the node offers to the cluster."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return float(sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == here))


def order_of(launch: Launch) -> bytes:
    """Serialize launch options for the actor's constructor."""
    return protocol.encode_launch(launch)
