"""What adapters (LoRA) add to linear maps, for rows by the adapter that each has. `reference.py` is the truth.

a map's table     slot 0 | slot 1 | ..      of each adapter in memory: its part of every map, or none
AdapterRows       rows of slot 0, rows of slot 3, rows without
update(x, rows) ──> LoraUpdate ──> Weight.linear(x, bias, dtype, update)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.lora.rows import AdapterRows

MAX_SLOTS = 256
"""Adapters in memory at one time."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraMap:
    """An adapter's part of some neighbouring rows of a weight: scale * B (A x)."""

    first: int
    """Row of the weight that it begins at."""
    rows: int
    scale: float
    a: Tensor
    """[rank, columns]"""
    b: Tensor
    """[rank, rows]: B transposed."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraUpdate:
    """What is added to a map's outputs before its activation."""

    added: Tensor
    """[num_tokens, columns] float32; -0 for rows without an adapter, which changes nothing."""
    rows: AdapterRows
    """Where no row has an adapter, `added` counts for nothing."""
    first: int = 0
    """Column that the map's outputs begin at."""


class LoraTable(Protocol):
    """What each adapter in memory adds to one weight's map, by slots below `MAX_SLOTS`."""

    def put(self, slot: int, maps: Sequence[LoraMap]) -> None:
        """Fill a slot that is empty; the maps' tensors are of the table's dtype, and by ascending rows."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        ...

    def update(self, x: Tensor, rows: AdapterRows) -> LoraUpdate | None:
        """What is added to the map of `x` [num_tokens, columns], whose rows have these adapters; None: nothing."""
        ...


class NewLora(Protocol):
    """Makes a table for a weight [rows, columns], with all slots empty."""

    def __call__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> LoraTable: ...
