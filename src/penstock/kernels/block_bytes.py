"""KV blocks of a cache group as bytes, all layers of a block in one piece, for files and other engines."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class BlockBytes(Protocol):
    """The bytes of blocks, for several threads; no thread may access a block while another writes it."""

    nbytes: int
    """Bytes of a block."""

    def read(self, block: int) -> memoryview:
        """A block's bytes: a view of the memory, or a copy."""

    def fill(self, block: int, fill: Callable[[memoryview], bool]) -> bool:
        """Have `fill` write a block's bytes. Returns its result; if that is False, the block's content is undefined."""


class BytesInPlace:
    """Blocks that are contiguous in host memory."""

    def __init__(self, blocks: NDArray[np.uint8]) -> None:
        """`blocks`: [num_blocks, nbytes]."""
        assert blocks.dtype == np.uint8
        assert blocks.strides[1] == 1
        self._blocks = blocks
        self.nbytes = blocks.shape[1]

    @property
    def address(self) -> int:
        """Address of block 0."""
        return int(self._blocks.ctypes.data)

    @property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return int(self._blocks.strides[0])

    def read(self, block: int) -> memoryview:
        content: memoryview = self._blocks[block].data
        return content

    def fill(self, block: int, fill: Callable[[memoryview], bool]) -> bool:
        return fill(self._blocks[block].data)
