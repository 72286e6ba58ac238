"""KV blocks of an engine with several ranks as bytes: the ranks' parts, concatenated.

    rank 0's part   own memory ─────────────────┐
    rank 1's part   process_vm_readv, _writev ──┴── a block's bytes        to the file and back (`runner.block_store`)

The other ranks are child processes of rank 0 on the same machine, so it may read and write their memory. It accesses
only blocks that the current step does not write, and when blocks are moved all ranks end a step together. Loaded blocks
are complete before a plan uses them.
"""

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.kernels.block_bytes import BlockBytes, BytesInPlace
from penstock.kernels.ranks import Collective
from penstock.native.array import Array

_FACTS = 3
"""Numbers that a rank sends per cache group."""


class _Area(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class PartOfRank:
    """A rank's part of the blocks of a cache group, in its process's memory."""

    pid: int
    address: int
    stride: int
    """Distance between blocks in bytes."""
    nbytes: int
    """Bytes of a part."""

    def read(self, block: int, target: "NDArray[np.uint8]") -> None:
        """Copy a block's part to `target` [nbytes]. Raises the same errors as `write`."""
        self._move("process_vm_readv", block, target)

    def write(self, block: int, source: "NDArray[np.uint8]") -> None:
        """Copy `source` [nbytes] to a block's part.

        Raises:
            OSError: the rank has ended, or the system does not allow it.
        """
        self._move("process_vm_writev", block, source)

    def _move(self, call: str, block: int, here: "NDArray[np.uint8]") -> None:
        assert here.nbytes == self.nbytes
        move = getattr(_LIBC, call, None)
        if move is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        move.restype, done = ctypes.c_ssize_t, 0
        while done < self.nbytes:
            own = _Area(here.ctypes.data + done, self.nbytes - done)
            other = _Area(self.address + block * self.stride + done, self.nbytes - done)
            num_parts, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
            moved = move(ctypes.c_int(self.pid), ctypes.byref(own), num_parts, ctypes.byref(other), num_parts, no_flags)
            if moved <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done += moved


class RankedBytes:
    """Blocks divided among the ranks. See `BlockBytes`."""

    def __init__(self, own: BlockBytes, others: Sequence[PartOfRank]) -> None:
        self._own, self._others = own, others
        ends = np.cumsum([own.nbytes, *(part.nbytes for part in others)]).tolist()
        self._places = [slice(first, last) for first, last in itertools.pairwise(ends)]
        self.nbytes: int = ends[-1]

    def read(self, block: int) -> memoryview:
        content = np.empty(self.nbytes, np.uint8)
        content[: self._own.nbytes] = self._own.read(block)
        for part, place in zip(self._others, self._places, strict=True):
            part.read(block, content[place])
        found: memoryview = content.data
        return found

    def fill(self, block: int, fill: Callable[[memoryview], bool]) -> bool:
        content = np.empty(self.nbytes, np.uint8)
        if not fill(content.data):
            return False
        for part, place in zip(self._others, self._places, strict=True):
            part.write(block, content[place])
        return self._own.fill(block, lambda own: _copy(own, content.data[: len(own)]))


def _copy(target: memoryview, source: memoryview) -> bool:
    target[:] = source
    return True


def _gathered(numbers: Sequence[int], collective: Collective) -> NDArray[np.int64]:
    """As many numbers of every rank."""
    own = Array(np.array([numbers], np.int64))
    of_all: NDArray[np.int64] = collective.columns(own, len(numbers) * collective.ranks.size).numpy()
    return of_all


def ranked_blocks(blocks: Sequence[BlockBytes] | None, collective: Collective) -> list[RankedBytes] | None:
    """The blocks of all ranks, in rank 0; each rank calls this with its own. None: some cannot be accessed.

    Raises:
        ConfigError: the system does not let rank 0 read the memory of the others.
    """
    plain = [group for group in blocks or () if isinstance(group, BytesInPlace)]
    is_plain = blocks is not None and len(plain) == len(blocks)
    known = _gathered([int(is_plain), len(plain), os.getpid()], collective)
    gathered = known.reshape(-1, 3).tolist()
    if not all(reachable for reachable, _, _ in gathered):
        return None
    facts = [fact for group in plain for fact in (group.address, group.stride, group.nbytes)]
    of_all = _gathered(facts, collective).reshape(-1, len(plain), _FACTS)
    if collective.ranks.rank:
        return None
    parts = [
        [PartOfRank(pid, *group) for group in of_rank]
        for (_, _, pid), of_rank in zip(gathered, of_all.tolist(), strict=True)
    ][1:]
    found = [RankedBytes(own, of_group) for own, of_group in zip(plain, zip(*parts, strict=True), strict=True)]
    try:
        for group in found:
            group.read(0)
    except OSError as error:
        raise ConfigError(
            f"kv_disk and prefill_engines do not go with tensor_parallel_size above 1 here: the system forbids to read "
            f"the memory of child processes ({error}), as a container without the capability SYS_PTRACE may"
        ) from error
    return found
