"""Tensor parallelism: divides a model among the ranks of an engine, processes with their own rows of the weights.

Ranks divide the outputs of a linear map, never its sums: one rank computes each element as it would without others, so
answers are bit-identical for any number of ranks. The ranks then exchange their outputs (`kernels.ranks`).
"""

from penstock.dataclass import dataclass
from penstock.errors import ConfigError

RANK_PROCESS = "penstock.runner.rank_process"
"""The module that runs in the process of a rank other than the first."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of an engine, and the number of ranks."""

    rank: int = 0
    size: int = 1

    def own(self, total: int) -> range:
        """This rank's range of `total` items. The ranks' ranges are adjacent; their lengths differ by at most one."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of rank 0 for ranks on other nodes, and the keys with which ranks authenticate.

    The keys are CURVE keys in Z85, valid for one start of the engine.
    """

    host: str
    """Address of the first rank's node."""
    plans_port: int
    """Port of rank 0's socket for plans, encrypted."""
    tensors_port: int
    """Port of the rendezvous of torch.distributed."""
    num_nodes: int
    first_public: str
    first_secret: str
    ranks_public: str
    ranks_secret: str

    def node_of(self, ranks: Ranks) -> int:
        """Index of a rank's node; consecutive ranks share a node, and rank 0 is on node 0."""
        return ranks.rank * self.num_nodes // ranks.size

    def of_node(self, node: int, size: int) -> range:
        """The ranks on a node, of `size` ranks in all."""
        return Ranks(node, self.num_nodes).own(size)


@dataclass(frozen=True, slots=True)
class RankJoin:
    """Launch options of a rank's process on another node than rank 0, which sends it the rest (`RankOrder`)."""

    rendezvous: Rendezvous
    model: str | None
    """The model as the user named it."""
    ranks: Ranks
    revision: str | None = None
    hf_overrides: str | None = None
    mmproj: str | None = None

    def encode(self) -> bytes:
        """Encode as one line."""
        import msgspec  # here: most engines have one rank, and a start waits 10 ms for it

        return _JOIN + msgspec.json.encode(self) + b"\n"

    @staticmethod
    def decode(line: bytes) -> "RankJoin | None":
        """Decode a line from the parent; None: it is the `RankLaunch` of a rank on rank 0's node."""
        import msgspec

        return msgspec.json.decode(line[len(_JOIN) :], type=RankJoin) if line.startswith(_JOIN) else None


_JOIN = b"join "


def check_divides(size: int, total: int) -> None:
    """Check that the model's heads can be divided among `size` ranks.

    Args:
        total: must be a multiple of the number of ranks; 0: any number is allowed.

    Raises:
        ConfigError: they cannot; the message lists the possible numbers of ranks.
    """
    if size < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, not {size}")
    if total % size:
        fitting = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide this model: every rank must have as many heads of keys, or "
            f"channels of recurrent layers, as the others; {fitting} would"
        )
