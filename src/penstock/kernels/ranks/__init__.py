"""Collective operations between the ranks of a model, within a layer.

`reference.py` uses torch.distributed, `native.py` shared memory between processes of one machine.
"""

from typing import Protocol

from penstock.config.ranks import ALONE, Ranks
from penstock.native.array import AnyArray


class Collective(Protocol):
    """Gathers tensors from all ranks. All ranks call the same methods in the same order."""

    ranks: Ranks

    def columns(self, x: AnyArray, total: int, *, first_only: bool = False) -> AnyArray:
        """Gather the columns of all ranks: `x` [rows, this rank's share of `total`] -> [rows, total].

        Args:
            first_only: only rank 0 needs the result; on other ranks its content is undefined.
        """
        ...

    def rows(self, x: AnyArray, owned: AnyArray, total: int) -> AnyArray:
        """Take each row of `x` [rows, columns] from the rank that owns item `owned[row]` of `total` items.

        `owned` is [rows] int64. -> [rows, columns]
        """
        ...


class Alone:
    """The collective operations of a single rank: the identity."""

    ranks: Ranks = ALONE

    def columns(self, x: AnyArray, total: int, *, first_only: bool = False) -> AnyArray:
        return x

    def rows(self, x: AnyArray, owned: AnyArray, total: int) -> AnyArray:
        return x
