"""A linear map's weight as its kernel keeps it: what the layers above see of either version."""

from typing import Protocol

import torch
from torch import Tensor

from penstock.memory import WeightKind

GROUP = 128
"""Columns that share a scale, and a zero, in a weight of less than 8 bits."""


class Weight(Protocol):
    """A weight [rows, columns], filled piece by piece.

    kind      "float": of the model's dtype; "int8": a scale a row; "int6": a scale for each GROUP of a row; "int4": a
              scale and a zero for each
    gated     the rows are those of a gate, then as many of `up`: the map is silu(gate(x)) * up(x)
    """

    rows: int
    columns: int
    kind: WeightKind
    gated: bool
    bias_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        ...

    def load(self, first: int, rows: Tensor) -> None:
        """Fill the rows from `first` on with `rows` [n, columns] of a floating type; of a "float" weight only."""
        ...

    def load_int8(self, first: int, values: Tensor, scales: Tensor) -> None:
        """Fill rows of an "int8" weight with `values` int8 [n, columns], from -127 to 127, times `scales` [n]."""
        ...

    def load_int6(self, first: int, values: Tensor, scales: Tensor) -> None:
        """Fill rows of an "int6" weight with `values` int8 [n, columns], from -31 to 31, times `scales`.

        `scales` [n, groups] are kept as float16.
        """
        ...

    def load_int4(self, first: int, values: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """Fill rows of an "int4" weight with (`values` - `zeros`) * `scales`.

        `values` uint8 [n, columns] from 0 to 15; `scales` [n, groups], kept as float16, and `zeros` uint8
        [n, groups], 0 to 15.
        """
        ...

    def lookup(self, row_ids: Tensor) -> Tensor:
        """The rows `row_ids` [n] int64 -> [n, columns] of the model's dtype: an embedding."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`x` [num_tokens, columns] -> [num_tokens, rows] of `dtype`, or half the rows if gated; `bias` [rows]."""
        ...


class NewWeight(Protocol):
    """Makes a weight without content; see `Weight` for the arguments."""

    def __call__(
        self, rows: int, columns: int, kind: WeightKind, *, gated: bool, dtype: torch.dtype, device: torch.device
    ) -> Weight: ...
