"""How a model is divided among the ranks of an engine: processes, each with its own rows of the weights.

The outputs of a map are divided, never its sums: each element is computed by one rank, as if there were no other, so
that an answer is the same, bit for bit, for any number of ranks. Then the ranks exchange what they have
(`kernels.ranks`).
"""

from dataclasses import dataclass

import msgspec

from penstock.errors import ConfigError

RANK_PROCESS = "penstock.runner.rank_process"
"""The module that the process of a rank other than the first runs."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of an engine's."""

    rank: int = 0
    size: int = 1

    def own(self, total: int) -> range:
        """This rank's range of `total` items; ranks have neighbouring ranges whose lengths differ by at most one."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of an engine on several nodes find the first one, and how each proves to be one of them.

    Keys are CURVE's, as Z85, made for one start of the engine.
    """

    host: str
    """Address of the first rank's node."""
    plans_port: int
    """There plans come from, encrypted."""
    tensors_port: int
    """There torch.distributed has its ranks meet."""
    num_nodes: int
    first_public: str
    first_secret: str
    ranks_public: str
    ranks_secret: str

    def node_of(self, ranks: Ranks) -> int:
        """Which of the nodes a rank is on, the first one's being 0: neighbours share one."""
        return ranks.rank * self.num_nodes // ranks.size

    def of_node(self, node: int, size: int) -> range:
        """The ranks, of `size`, on a node."""
        return Ranks(node, self.num_nodes).own(size)


@dataclass(frozen=True, slots=True)
class RankJoin:
    """The settings of a rank's process on a further node; the first rank sends it the rest."""

    rendezvous: Rendezvous
    model: str | None
    """As the user named it."""
    ranks: Ranks
    revision: str | None = None
    hf_overrides: str | None = None

    def encode(self) -> bytes:
        """As a line."""
        return _JOIN + msgspec.json.encode(self) + b"\n"

    @staticmethod
    def decode(line: bytes) -> "RankJoin | None":
        """From a line of the parent's; None: it is the order of a rank of the first node."""
        return msgspec.json.decode(line[len(_JOIN) :], type=RankJoin) if line.startswith(_JOIN) else None


_JOIN = b"join "


def check_divides(size: int, total: int) -> None:
    """Refuse a number of ranks among which a model's heads cannot be divided.

    Args:
        total: what a number of ranks must divide; 0: any will do.

    Raises:
        ConfigError: it does not; the message names those that do.
    """
    if size < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, not {size}")
    if total % size:
        fitting = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide this model: every rank must have as many heads of keys, or "
            f"channels of recurrent layers, as the others; {fitting} would"
        )
