"""The adapter of each row of a forward pass."""

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.native import structs

IntArray = NDArray[np.int32]
NO_ADAPTER = -1

_NOTHING: IntArray = np.empty(0, np.int32)


class AdapterRows:
    """Rows of the current forward pass, grouped by adapter slot. Native kernels read them at a fixed address."""

    def __init__(self) -> None:
        self._struct = structs.AdapterRows()
        self.handle = ctypes.addressof(self._struct)
        """Address of the struct that native kernels read."""
        self._slots = self._starts = self._rows = self.row_slots = _NOTHING
        """`row_slots` [num_rows]: the slot of each row or `NO_ADAPTER`; empty if no row has an adapter."""

    def assign(self, row_slots: IntArray | None) -> None:
        """Set the rows of a pass: the slot of each row [num_rows] or `NO_ADAPTER`; None: no row has an adapter."""
        if row_slots is None or bool((row_slots == NO_ADAPTER).all()):
            self._struct.num_runs = 0
            self._slots = self._starts = self._rows = self.row_slots = _NOTHING
            return
        self.row_slots = np.ascontiguousarray(row_slots, np.int32)
        self._rows = np.argsort(row_slots, kind="stable").astype(np.int32)
        in_order = row_slots[self._rows]
        begins = np.flatnonzero(np.diff(in_order, prepend=in_order[0] - 1))
        self._slots = in_order[begins].astype(np.int32)
        self._starts = np.append(begins, len(in_order)).astype(np.int32)
        self._struct.slots, self._struct.starts, self._struct.rows, self._struct.row_slots = (
            part.ctypes.data for part in (self._slots, self._starts, self._rows, self.row_slots)
        )
        self._struct.num_runs = len(self._slots)

    @property
    def is_empty(self) -> bool:
        """Whether no row has an adapter."""
        return not len(self._slots)

    def runs(self) -> Iterator[tuple[int, IntArray]]:
        """Yield (slot, its rows) for each slot that rows have."""
        for slot, first, last in zip(self._slots, self._starts[:-1], self._starts[1:], strict=True):
            if slot != NO_ADAPTER:
                yield int(slot), self._rows[first:last]
