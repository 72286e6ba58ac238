"""LoRA updates of linear maps, where each row of a batch may have its own adapter. `reference.py` is the truth.

a map's table     slot 0 | slot 1 | ..      one slot for each adapter in memory, which may hold no maps
AdapterRows       rows of slot 0, rows of slot 3, rows without
update(x, rows) ──> LoraUpdate ──> Weight.linear(x, bias, dtype, update)
"""

from collections.abc import Sequence
from typing import Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.lora.rows import AdapterRows
from penstock.native.array import AnyDtype

MAX_SLOTS = 256
"""Adapters in memory at one time."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraMap(Generic[A]):
    """An adapter's update of consecutive rows of a weight W: scale * B (A x), beside factors * (W x) for DoRA."""

    first: int
    """First row of the weight that it updates."""
    rows: int
    scale: float
    a: A
    """[rank, columns]"""
    b: A
    """[rank, rows]: B transposed."""
    factors: NDArray[np.float32] | None = None
    """[rows]: what DoRA multiplies W x by, before the bias is added; None: nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraUpdate(Generic[A]):
    """Values to add to a map's outputs before its activation."""

    added: A
    """[num_tokens, columns] float32; -0 in rows without an adapter: adding it changes no bit."""
    rows: AdapterRows
    """If no row has an adapter, `added` is not read."""
    first: int = 0
    """First column of the map's outputs."""
    factors: A | None = None
    """[num_tokens, columns] float32, multiplied with W x; None: all 1, or the native kernels find them in `slots`."""
    slots: int | None = None
    """Address of the library's structs of the table."""


class LoraTable(Protocol[A]):
    """The updates of one weight by all adapters in memory, in slots 0 to `MAX_SLOTS` - 1."""

    def put(self, slot: int, maps: Sequence[LoraMap[A]]) -> None:
        """Fill an empty slot. Maps have the table's dtype and come in ascending order of rows."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        ...

    def update(self, x: A, rows: AdapterRows, *, column: int = 0) -> LoraUpdate[A] | None:
        """The update of the outputs for the columns of `x` [num_tokens, any] from `column` on, whose rows have these
        adapters; None: no update.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ExpertUpdates(Generic[A]):
    """The updates of a mixture's experts."""

    rows: AdapterRows
    """The adapters of the tokens."""
    gate_up: Sequence[LoraTable[A]]
    """One per expert, like `down`; both from `NewExpertLora`."""
    down: Sequence[LoraTable[A]]


class LookupTable(Protocol[A]):
    """The updates of an embedding by all adapters in memory. Each has one map, whose `a` is [vocabulary, rank]."""

    def put(self, slot: int, maps: Sequence[LoraMap[A]]) -> None:
        """Fill an empty slot."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        ...

    def add(self, y: A, row_ids: A, rows: AdapterRows) -> None:
        """Add the updates of the ids `row_ids` [n] int64 to the rows looked up, `y` [n, columns], in place."""
        ...


class NewLora(Protocol[A]):
    """Makes a table for a weight [rows, columns], with all slots empty."""

    def __call__(self, rows: int, columns: int, dtype: AnyDtype, device: str) -> LoraTable[A]: ...


class NewExpertLora(Protocol[A]):
    """Makes a table for each of `count` experts' weights [rows, columns]."""

    def __call__(self, count: int, rows: int, columns: int, dtype: AnyDtype, device: str) -> Sequence[LoraTable[A]]: ...


class NewLookupTable(Protocol[A]):
    """Makes a table for an embedding of this many columns, with all slots empty."""

    def __call__(self, columns: int, dtype: AnyDtype, device: str) -> LookupTable[A]: ...
