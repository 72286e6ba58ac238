"""The states of recurrent layers: a pool of blocks; a block holds the state after one token of a sequence.

    block 0                         block 1
    | layer 0      | layer 1  | ..  | layer 0 ...
    | part | part  |                            float32, each part aligned to 16 elements

`penstock.config.state_layout` defines the layout of matrices in a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic

from penstock.config.state_layout import part_elements
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A


@dataclass(frozen=True, slots=True)
class StateShape:
    """The parameters of the layers' states."""

    num_layers: int
    num_blocks: int
    block_size: int
    """Tokens per block."""
    parts: tuple[tuple[int, ...], ...]
    """The shapes of the parts of a layer's state."""
    device: str

    @property
    def elements(self) -> int:
        """Of all states."""
        return self.num_blocks * self.num_layers * sum(map(part_elements, self.parts))


@dataclass(frozen=True, slots=True)
class StatePart(Generic[A]):
    """One part of a layer's states."""

    memory: A
    """[num_blocks, *shape] float32; a block's part is contiguous."""
    block_size: int


CopyRows = Callable[[A, Sequence[tuple[int, int]]], None]
"""See `penstock.kernels.ops.Ops.copy_rows`."""


class StateCache(Generic[A]):
    """The states of one layer."""

    def __init__(self, parts: tuple[StatePart[A], ...], copy_rows: CopyRows[A]) -> None:
        self.parts, self._copy_rows = parts, copy_rows

    @property
    def nbytes(self) -> int:
        """Size in bytes, without padding."""
        return sum(math.prod(part.memory.shape) * part.memory.dtype.itemsize for part in self.parts)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks simultaneously; each pair is (source, target)."""
        for part in self.parts:
            self._copy_rows(part.memory, pairs)


@dataclass(frozen=True, slots=True)
class StateCaches(Generic[A]):
    """The states of all layers of a cache group."""

    layers: tuple[StateCache[A], ...]
    back: Callable[[int], None]
    """Backs the first `num_blocks` blocks of all layers with physical memory."""


def states_in(pool: Any, shape: StateShape, copy_rows: CopyRows[A], array_over: Callable[[Any], A]) -> StateCaches[A]:
    """The states in a pool of `shape.elements` zeros, of numpy or torch; `array_over` makes the array of a part."""
    blocks = pool.reshape(shape.num_blocks, shape.num_layers, -1)
    layers = (StateCache(_parts(blocks[:, layer], shape, array_over), copy_rows) for layer in range(shape.num_layers))
    return StateCaches(tuple(layers), lambda num_blocks: None)


def _parts(blocks: Any, shape: StateShape, array_over: Callable[[Any], A]) -> tuple[StatePart[A], ...]:
    """The parts of a layer's states in its slice [num_blocks, elements] of the pool."""
    parts, first = [], 0
    for part in shape.parts:
        memory = blocks[:, first : first + math.prod(part)].reshape(len(blocks), *part)  # a view: rows are contiguous
        parts.append(StatePart(array_over(memory), shape.block_size))
        first += part_elements(part)
    return tuple(parts)
