"""Ranks that torch.distributed connects: on GPUs, on several nodes, and without the native library."""

import torch
from torch import distributed

from penstock.config.ranks import Ranks, Rendezvous
from penstock.kernels.ranks.reference import DistributedCollective, lost_peers
from penstock.runner.rank_network import PlanSink, PlanSource, use_interface_towards
from penstock.system.host import bracketed


class DistributedGroup:
    """Ranks that torch.distributed connects. See `Group`."""

    def __init__(self, ranks: Ranks, rendezvous: str, backend: str) -> None:
        """
        Args:
            rendezvous: rendezvous address, the `init_method` of `init_process_group`.
            backend: for the layers' collective operations; plans go through gloo.
        """
        distributed.init_process_group(backend, init_method=rendezvous, rank=ranks.rank, world_size=ranks.size)
        world = distributed.group.WORLD
        assert world is not None
        self.collective = DistributedCollective(world)
        self._plans = world if backend == "gloo" else distributed.new_group(backend="gloo")

    def broadcast(self, message: bytes) -> bytes:
        with lost_peers():
            return self._broadcast(message)

    def _broadcast(self, message: bytes) -> bytes:
        size = torch.tensor([len(message)])
        distributed.broadcast(size, 0, self._plans)
        first = self.collective.ranks.rank == 0
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8) if first and message else None
        if content is None:
            content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            distributed.broadcast(content, 0, self._plans)
        return content.numpy().tobytes()

    def abort(self) -> None:
        """Do nothing: calls over the broken connection fail."""

    def close(self) -> None:
        distributed.destroy_process_group()


class NetworkGroup(DistributedGroup):
    """Ranks on several nodes. See `Group`."""

    def __init__(self, ranks: Ranks, rendezvous: Rendezvous, backend: str, plans: PlanSource | PlanSink) -> None:
        use_interface_towards(rendezvous.host)
        super().__init__(ranks, f"tcp://{bracketed(rendezvous.host)}:{rendezvous.tensors_port}", backend)
        self._channel = plans
        self._is_loaded = False

    def broadcast(self, message: bytes) -> bytes:
        """See `Group`. The first call is a barrier: it returns once every rank has loaded its part."""
        if not self._is_loaded:
            distributed.barrier(self._plans)
            self._is_loaded = True
            return message
        return self._channel.broadcast(message)

    def close(self) -> None:
        self._channel.close()
        super().close()
