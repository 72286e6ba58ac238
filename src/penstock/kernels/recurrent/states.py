"""The states of recurrent layers: a pool of blocks; a block holds the state after one token of a sequence.

    block 0                         block 1
    | layer 0      | layer 1  | ..  | layer 0 ...
    | part | part  |                            float32, each part aligned to 16 elements

`penstock.config.state_layout` defines the layout of matrices in a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.state_layout import part_elements
from penstock.system.allocator import Allocator

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """The parameters of the layers' states."""

    num_layers: int
    num_blocks: int
    block_size: int
    """Tokens per block."""
    parts: tuple[tuple[int, ...], ...]
    """The shapes of the parts of a layer's state."""
    device: torch.device


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of a layer's states."""

    memory: Tensor
    """[num_blocks, *shape] float32; a block's part is contiguous."""
    block_size: int


CopyRows = Callable[["Tensor", Sequence[tuple[int, int]]], None]
"""See `penstock.kernels.ops.Ops.copy_rows`."""


class StateCache:
    """The states of one layer."""

    def __init__(self, parts: tuple[StatePart, ...], copy_rows: CopyRows) -> None:
        self.parts, self._copy_rows = parts, copy_rows

    @property
    def nbytes(self) -> int:
        """Size in bytes, without padding."""
        return sum(part.memory.numel() * part.memory.itemsize for part in self.parts)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks simultaneously; each pair is (source, target)."""
        for part in self.parts:
            self._copy_rows(part.memory, pairs)


@dataclass(frozen=True, slots=True)
class StateCaches:
    """The states of all layers of a cache group."""

    layers: tuple[StateCache, ...]
    back: Callable[[int], None]
    """Backs the first `num_blocks` blocks of all layers with physical memory."""


def new_states(shape: StateShape, allocator: Allocator, copy_rows: CopyRows) -> StateCaches:
    """Allocate the states in one piece; on a CPU the operating system zeroes pages on first touch."""
    import torch

    elements = sum(map(part_elements, shape.parts))
    total = shape.num_blocks * shape.num_layers * elements
    if shape.device.type == "cpu":
        memory = torch.from_numpy(allocator.zeros(4 * total)).view(torch.float32)
    else:
        memory = torch.zeros(total, dtype=torch.float32, device=shape.device)
    pool = memory.view(shape.num_blocks, shape.num_layers, elements)
    layers = (StateCache(_parts(pool[:, layer], shape), copy_rows) for layer in range(shape.num_layers))
    return StateCaches(tuple(layers), lambda num_blocks: None)


def _parts(blocks: Tensor, shape: StateShape) -> tuple[StatePart, ...]:
    """The parts of a layer's states in its slice [num_blocks, elements] of the pool."""
    parts, first = [], 0
    for part in shape.parts:
        size = math.prod(part)
        parts.append(StatePart(blocks[:, first : first + size].view(len(blocks), *part), shape.block_size))
        first += part_elements(part)
    return tuple(parts)
