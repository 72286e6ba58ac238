"""How a rank reaches the others: the interface, and ranks that share memory. `torch_groups` has those without."""

from typing import Protocol

from penstock.kernels.ranks import Collective
from penstock.kernels.ranks.native import SharedMemoryCollective


class Group(Protocol):
    """A rank's connection to the other ranks."""

    @property
    def collective(self) -> Collective:
        """Layers' operations for exchanging columns and rows."""
        ...

    def broadcast(self, message: bytes) -> bytes:
        """Broadcast rank 0's message, of any length, to every rank; other ranks' arguments are ignored."""
        ...

    def abort(self) -> None:
        """Note that a rank has ended, so that no call waits for it. Called by another thread."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class SharedGroup:
    """Ranks that share memory. See `Group`."""

    def __init__(self, collective: SharedMemoryCollective) -> None:
        self.collective = collective
        self.broadcast, self.abort = collective.broadcast, collective.abort

    def close(self) -> None:
        """Do nothing: the memory is freed with the last process."""
