"""Destinations of an adapter's LoRA matrices, by the checkpoint's matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.linear.weight import LinearMap
from penstock.quantization.rows import RowRun

if TYPE_CHECKING:
    from penstock.kernels.lora import LookupTable, LoraTable


@dataclass(frozen=True, slots=True)
class AdaptedRows(Generic[A]):
    """The destination of an adapter's LoRA matrices for one checkpoint matrix."""

    table: LoraTable[A]
    first: int
    """First row of the matrix in the table's weight."""
    runs: tuple[RowRun, ...]
    """The rows of the matrix that this rank has."""
    weight: LinearMap[A]
    """The weight, which has the table's rows."""
    order: tuple[RowRun, ...] = ()
    """How `WeightFactory.reorder_rows` reorders the checkpoint's rows before; (): it does not."""

    def own_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The rank's rows of `rows` [as in the checkpoint, any]."""
        if self.order:
            stored, rows = rows, np.empty_like(rows)
            for run in self.order:
                rows[run.first : run.first + run.rows] = stored[run.given : run.given + run.rows]
        return np.concatenate([rows[run.given : run.given + run.rows] for run in self.runs])


@dataclass(frozen=True, slots=True)
class AdaptedHeads(Generic[A]):
    """The destination of an adapter's LoRA matrices for latent attention's `kv_b_proj`.

    Each head has the rows of its keys, then those of its values; the keys' part is used transposed.
    """

    keys: tuple[LoraTable[A], ...]
    """One for each of the rank's heads, like `values`."""
    values: tuple[LoraTable[A], ...]
    heads: range
    """The rank's heads."""
    key_dim: int
    """Rows of a head's key part."""
    value_dim: int


@dataclass(frozen=True, slots=True)
class AdaptedEmbedding(Generic[A]):
    """The destination of an adapter's LoRA matrices for an embedding."""

    table: LookupTable[A]
    rows: int
    """Rows that are looked up; those after the checkpoint's are its first one."""
