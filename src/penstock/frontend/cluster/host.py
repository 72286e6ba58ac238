"""An engine's parent on a node of the cluster: a Ray actor that starts it, waits for its end, and takes it along.

The server creates it. It ends with the server, with its node, or on request, and its engine ends with it.
"""

import socket
from dataclasses import dataclass, replace
from importlib import metadata

import msgspec

from penstock.config import EngineConfig
from penstock.engine import protocol
from penstock.engine.protocol import Launch
from penstock.errors import ConfigError
from penstock.frontend.engine_process import EngineProcess
from penstock.host import free_memory

NODE_ID_SHOWN = 12


@dataclass(frozen=True, slots=True)
class End:
    """How an engine ended, as its parent saw it."""

    code: int
    was_stopped: bool
    request_indices: list[int] | None
    last_words: bytes


class EngineHost:
    """One engine process. Its constructor runs in the actor's main thread, so the engine lives as long as the actor."""

    def __init__(self, version: str, launch: bytes, num_cpus: float) -> None:
        """
        Args:
            version: of the server's package.
            launch: for an engine with a remote server, but for its folder, which is made here.
            num_cpus: of this node, that are reserved for it.

        Raises:
            ConfigError: this node has another version, or no room for the folder.
            EngineDeadError: the process cannot be started.
        """
        if version != own_version():
            raise ConfigError(
                f"node {socket.gethostname()} has penstock {own_version()}, and the server {version}: install the same"
            )
        order = protocol.decode_launch(launch)
        config = share_memory(order.config, num_cpus, cpus_of_this_node())
        self._process = EngineProcess(lambda folder: msgspec.structs.replace(order, folder=folder, config=config))

    def whereabouts(self) -> tuple[str, int]:
        """The node, by its address and the beginning of its id in Ray, and the engine's process id."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        return f"{ray.util.get_node_ip_address()}/{here[:NODE_ID_SHOWN]}", self._process.pid

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


def own_version() -> str:
    """Of the package that is installed here."""
    return metadata.version("penstock")


def share_memory(config: EngineConfig, num_cpus: float, of: float) -> EngineConfig:
    """Have an engine plan within the part of its node's free memory that its CPUs are of the node's."""
    if config.cache.max_memory is not None or not 0 < num_cpus < of:
        return config
    return replace(config, cache=replace(config.cache, max_memory=int(free_memory() * num_cpus / of)))


def cpus_of_this_node() -> float:
    """How many CPUs the node offers to the cluster."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return float(sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == here))


def order_of(launch: Launch) -> bytes:
    """A launch as the constructor takes it."""
    return protocol.encode_launch(launch)
