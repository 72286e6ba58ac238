"""Collective operations between the ranks of a model, within a layer.

`reference.py` uses torch.distributed, `native.py` shared memory between processes of one machine.
"""

from typing import Generic, Protocol

from penstock.config.ranks import ALONE, Ranks
from penstock.kernels.array_types import A


class Collective(Protocol[A]):
    """Gathers tensors from all ranks. All ranks call the same methods in the same order."""

    ranks: Ranks

    def columns(self, x: A, total: int, *, first_only: bool = False) -> A:
        """Gather the columns of all ranks: `x` [rows, this rank's share of `total`] -> [rows, total].

        Args:
            first_only: only rank 0 needs the result; on other ranks its content is undefined.
        """
        ...

    def rows(self, x: A, owned: A, total: int) -> A:
        """Take each row of `x` [rows, columns] from the rank that owns item `owned[row]` of `total` items.

        `owned` is [rows] int64. -> [rows, columns]
        """
        ...


class Alone(Generic[A]):
    """The collective operations of a single rank: the identity."""

    ranks: Ranks = ALONE

    def columns(self, x: A, total: int, *, first_only: bool = False) -> A:
        return x

    def rows(self, x: A, owned: A, total: int) -> A:
        return x
