"""I/O threads that move blocks between the pool and files: see `core.block_tier`."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from penstock.api.request import BlockSource, RemoteMemory
from penstock.core.block_writer import BlockAddress
from penstock.core.stored_blocks import Record
from penstock.dataclass import dataclass
from penstock.kernels.block_bytes import BlockBytes
from penstock.runner.block_file import BlockFile, Layout, open_peer

logger = logging.getLogger("penstock.engine")

READERS = 2
NICENESS = 5
"""Niceness of the writer thread, so that the step's threads have priority."""


class BlockTransport(Protocol):
    """Fetches blocks from another engine."""

    @property
    def memory(self) -> RemoteMemory | None:
        """Remote address of this engine's file; None: the path suffices."""

    def fetch(self, source: BlockSource, address: BlockAddress, group: int, block: memoryview) -> bool:
        """Fill a block of a cache group; returns whether its content matches the address.

        Raises:
            OSError: the engine or its blocks are unreachable.
        """

    def close(self) -> None: ...


@dataclass(slots=True)
class _PeerFile:
    path: str
    file: BlockFile
    num_readers: int = 0


class SharedFiles:
    """Reads the files of engines on this machine, which stay readable while they live. See `BlockTransport`.

    An open file occupies disk space even after its engine's end. So opening another engine's file closes those of
    engines that have ended.
    """

    memory = None

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._peers: dict[str, _PeerFile] = {}  # by mark

    def fetch(self, source: BlockSource, address: BlockAddress, group: int, block: memoryview) -> bool:
        peer = self._enter(source)
        try:
            return peer.file.read_block(address.slot, group, address.digest, address.key, block)
        finally:
            with self._lock:
                peer.num_readers -= 1

    def _enter(self, source: BlockSource) -> _PeerFile:
        with self._lock:
            peer = self._peers.get(source.mark)
            if peer is None:
                self._close_ended()
                peer = _PeerFile(source.file, open_peer(source.file, source.mark, self._layout))
                self._peers[source.mark] = peer
            peer.num_readers += 1
            return peer

    def _close_ended(self) -> None:
        for mark, peer in list(self._peers.items()):
            if not peer.num_readers and not os.path.exists(peer.path):
                del self._peers[mark]
                peer.file.close()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.file.close()


class BlockStore:
    """See `BlockIO`. One thread writes blocks, in order; others read."""

    def __init__(self, memory: Sequence[BlockBytes], file: BlockFile | None, transport: BlockTransport) -> None:
        """
        Args:
            memory: blocks of each cache group.
            file: the engine's own file; None: nothing is written.
        """
        self._memory, self._file, self._transport = memory, file, transport
        self._writer = ThreadPoolExecutor(1, "kv-write", _be_nice)
        self._readers = ThreadPoolExecutor(READERS, "kv-read")
        self._is_failing = False

    def source(self, slots: tuple[tuple[int, int], ...]) -> BlockSource:
        assert self._file is not None, "nothing is written here"
        # The open file, not its name: a temporary one has none, and the name may lead to another file later.
        path = f"/proc/{os.getpid()}/fd/{self._file.descriptor}"
        return BlockSource(path, self._file.mark, slots, self._transport.memory)

    def write(self, slot: int, group: int, block: int) -> "Future[int]":
        return self._writer.submit(self._write, slot, group, block)

    def _write(self, slot: int, group: int, block: int) -> int:
        assert self._file is not None
        with self._telling():
            return self._file.write_block(slot, group, self._memory[group].read(block))

    def commit(self, record: Record, checksums: list[int]) -> "Future[None]":
        return self._writer.submit(self._commit, record, checksums)

    def _commit(self, record: Record, checksums: list[int]) -> None:
        assert self._file is not None
        with self._telling():
            self._file.write_record(record, checksums)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Log the first of consecutive failures."""
        try:
            yield
        except OSError as error:
            if not self._is_failing:
                logger.warning("blocks cannot be written to kv_disk and are not stored: %s", error)
            self._is_failing = True
            raise
        self._is_failing = False

    def read(self, address: BlockAddress, group: int, block: int) -> "Future[bool]":
        return self._readers.submit(self._read, address, group, block)

    def _read(self, address: BlockAddress, group: int, block: int) -> bool:
        source, memory, file = address.source, self._memory[group], self._file
        # A request that comes back to the engine that computed it finds the blocks in its own file.
        if source is not None and (file is None or file.mark != source.mark):
            return memory.fill(block, lambda content: self._transport.fetch(source, address, group, content))
        assert file is not None
        slot, digest, key = address.slot, address.digest, address.key
        return memory.fill(block, lambda content: file.read_block(slot, group, digest, key, content))

    def close(self) -> None:
        """Finish pending operations, and close all files."""
        for threads in (self._readers, self._writer):
            threads.shutdown()
        self._transport.close()
        if self._file is not None:
            self._file.close()


def _be_nice() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
