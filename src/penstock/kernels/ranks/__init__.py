"""What ranks exchange between the operations of a layer.

`reference.py` is over torch.distributed, `native.py` over memory that processes of one machine share.
"""

from typing import Protocol

from torch import Tensor

from penstock.ranks import ALONE, Ranks


class Exchange(Protocol):
    """How a rank comes by what the others have. All ranks call the same methods, in one order."""

    ranks: Ranks

    def columns(self, x: Tensor, total: int, *, first_only: bool = False) -> Tensor:
        """`x` [rows, own of `total`] of every rank, beside one another: [rows, total].

        Args:
            first_only: no other rank than the first needs the result, whose content is undefined there then.
        """
        ...

    def rows(self, x: Tensor, owned: Tensor, total: int) -> Tensor:
        """Of each row of `x` [rows, columns] that of the rank that owns `owned` [rows] int64, of `total` things."""
        ...


class Alone:
    """The exchange of a single rank, which has everything."""

    ranks: Ranks = ALONE

    def columns(self, x: Tensor, total: int, *, first_only: bool = False) -> Tensor:
        return x

    def rows(self, x: Tensor, owned: Tensor, total: int) -> Tensor:
        return x
