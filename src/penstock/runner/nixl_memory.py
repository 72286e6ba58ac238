"""KV blocks of engines on other machines, by NIXL: an engine reads the memory to which another has mapped its file.

    prefill engine   file of blocks, mapped, registered ──> metadata of its agent, in each `BlockSource`
                          │ READ (UCX: TCP, shared memory, RDMA)
                          ▼
    decode engine    a room (buffer), registered ──checked as a file's block──> the pool

The other engine takes no part: a block that it overwrites meanwhile fails its checksum. Transfers do not write to the
pool
itself: a transfer that takes too long may still be writing when the block has another owner. So it keeps its buffer.
"""

import contextlib
import importlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.api.request import BlockSource, RemoteMemory
from penstock.core.block_writer import BlockAddress
from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.runner.block_file import PAGE, BlockFile, BlockSlots, Layout, slots_of

logger = logging.getLogger("penstock.engine")

TRANSFER_SECONDS = 5.0
"""Maximum duration of one transfer, of a block or less."""
RETRY_SECONDS = 30.0
"""Time for which an engine is not asked again after a transfer failed."""
MAX_PEERS = 64
"""Maximum engines to stay connected with."""
MAX_ROOMS = 16
"""Maximum transfers, including abandoned ones that may still be writing."""
SHORTEST_WAIT, LONGEST_WAIT = 20e-6, 1e-3
"""Seconds between two polls of a transfer."""
PROGRESS_MICROSECONDS = 10_000
"""Sleep of NIXL's thread unless something arrives; with its Python interface's default, 0, it spins.

This takes 0.4 % of a core in an idle engine, and a tenth of it 1.4 to 2 %. Arriving data wakes the thread, so transfers
take equally long with either (1 MiB over TCP: 3 to 4 ms).
"""


@dataclass(slots=True, eq=False)
class _Room:
    """Registered buffer of a transfer."""

    content: NDArray[np.uint8]
    request: int = 0
    peer: "_Peer | None" = None
    """The peer of the current transfer."""

    @property
    def address(self) -> int:
        return int(self.content.ctypes.data)


class _Peer:
    """An engine whose file can be read."""

    def __init__(self, name: str, address: int) -> None:
        self.name, self.address = name, address
        self.lock = threading.Lock()
        self.slots: BlockSlots | None = None
        self.num_transfers = 0
        self.failed: float | None = None
        """Time of the last failed transfer."""


class NixlMemory:
    """Exposes the engine's own file, and reads those of others. See `BlockTransport`."""

    def __init__(self, layout: Layout, file: BlockFile | None, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Raises:
            ConfigError: NIXL is not installed, or does not start.
        """
        self._layout, self._clock = layout, clock
        self._nixl = _import_nixl()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}  # by the marks of their files
        self._free: list[_Room] = []
        self._hung: list[_Room] = []
        self._num_rooms = 0
        self.memory: RemoteMemory | None = None
        self._mapped: mmap.mmap | None = None
        try:
            self._agent = self._start_agent()
            if file is not None:
                self._mapped = mmap.mmap(file.descriptor, file.nbytes)
                self.memory = self._offer(np.frombuffer(self._mapped, np.uint8))
        except Exception as error:  # NIXL has many exception types
            raise ConfigError(f"kv_transfer nixl cannot begin: {type(error).__name__}: {error}") from error

    def _start_agent(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
        config.useListenThread = config.captureTelemetry = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        agent = self._nixl.nixlAgent(f"penstock-{secrets.token_hex(16)}", config)
        agent.createBackend("UCX", {})
        return agent

    def _offer(self, content: NDArray[np.uint8]) -> RemoteMemory:
        self._register(content)
        return RemoteMemory(bytes(self._agent.getLocalMD()), int(content.ctypes.data))

    def _register(self, content: NDArray[np.uint8]) -> None:
        regions = [(int(content.ctypes.data), content.nbytes, 0, "")]
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, regions))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, source: BlockSource, address: BlockAddress, group: int, block: memoryview) -> bool:
        if source.memory is None:
            raise OSError("the engine does not offer its memory")
        peer = self._peer(source.mark, source.memory)
        with peer.lock:
            if peer.slots is None:
                peer.slots = slots_of(partial(self._read, peer), source.mark, self._layout)
        return peer.slots.read_block(address.slot, group, address.digest, address.key, block)

    def _peer(self, mark: str, memory: RemoteMemory) -> _Peer:
        """The engine whose file has this mark, reconnected if it failed some time ago."""
        with self._lock:
            self._sort_hung()
            peer = self._peers.get(mark)
            if peer is not None and peer.failed is not None:
                if self._clock() - peer.failed < RETRY_SECONDS or peer.num_transfers:
                    raise OSError("the engine did not answer before")
                self._forget(mark)
                peer = None
            if peer is None:
                self._make_room()
                peer = self._peers[mark] = self._connect(memory)
            return peer

    def _connect(self, memory: RemoteMemory) -> _Peer:
        try:
            return _Peer(self._agent.loadRemoteMD(memory.agent).decode(), memory.address)
        except Exception as error:
            raise ConnectionError(f"the engine cannot be reached: {type(error).__name__}: {error}") from error

    def _make_room(self) -> None:
        if len(self._peers) < MAX_PEERS:
            return
        idle = next((mark for mark, peer in self._peers.items() if not peer.num_transfers), None)
        if idle is None:
            raise OSError("too many engines hang")
        self._forget(idle)

    def _forget(self, mark: str) -> None:
        with contextlib.suppress(Exception):  # NIXL may have removed it by itself
            self._agent.invalidateRemoteMD(self._peers.pop(mark).name)

    def _read(self, peer: _Peer, offset: int, room: memoryview) -> bool:
        """See `ReadAt`."""
        if peer.failed is not None:
            raise OSError("the engine did not answer before")
        try:
            self._transfer(peer, peer.address + offset, room)
        except OSError as error:
            if peer.failed is None:
                peer.failed = self._clock()
                logger.warning("an engine's blocks are computed for %.0f s, not pulled: %s", RETRY_SECONDS, error)
            raise
        return True

    def _transfer(self, peer: _Peer, address: int, target: memoryview) -> None:
        room = self._take_room(peer)
        try:
            is_done = self._run(room, address, target.nbytes)
        except Exception as error:
            self._give_back(room)
            raise ConnectionError(f"a transfer failed: {type(error).__name__}: {error}") from error
        if not is_done:
            with self._lock:
                self._hung.append(room)
            raise TimeoutError(f"a transfer took more than {TRANSFER_SECONDS:.0f} s")
        target[:] = room.content[: target.nbytes].data
        self._give_back(room)

    def _run(self, room: _Room, address: int, size: int) -> bool:
        """Read memory of the room's peer into the room; False if that exceeds the time limit, and continues."""
        nixl, agent = self._nixl, self._agent
        assert room.peer is not None
        to = nixl.nixlXferDList(nixl.DRAM_SEG, [(room.address, size, 0)])
        of = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, size, 0)])
        room.request = agent.createXferReq(nixl.NIXL_READ, to, of, room.peer.name)
        state, pause = agent.postXferReq(room.request), SHORTEST_WAIT
        deadline = self._clock() + TRANSFER_SECONDS
        while state == nixl.NIXL_IN_PROG:
            if self._clock() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)
            state = agent.getXferStatus(room.request)
        if state != nixl.NIXL_SUCCESS:
            raise ConnectionError(str(state))
        return True

    # ── rooms ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_room(self, peer: _Peer) -> _Room:
        with self._lock:
            if self._free:
                room = self._free.pop()
            elif self._num_rooms < MAX_ROOMS:
                room = _Room(np.empty(max(PAGE, self._layout.record_bytes, *self._layout.group_bytes), np.uint8))
                self._register(room.content)
                self._num_rooms += 1
            else:
                raise OSError("too many transfers hang")
            room.peer = peer
            peer.num_transfers += 1
            return room

    def _give_back(self, room: _Room) -> None:
        """Return a room whose transfer has ended or failed."""
        with self._lock:
            self._end(room)

    def _end(self, room: _Room) -> None:
        assert room.peer is not None
        room.peer.num_transfers -= 1
        request, room.request, room.peer = room.request, 0, None
        if request:
            self._agent.releaseXferReq(request)
        self._free.append(room)

    def _sort_hung(self) -> None:
        """Return the rooms of abandoned transfers that have ended since."""
        for room in list(self._hung):
            try:
                state = self._agent.getXferStatus(room.request)
            except Exception:  # it ended with an error
                state = None
            if state != self._nixl.NIXL_IN_PROG:
                self._hung.remove(room)
                self._end(room)

    def close(self) -> None:
        """Close all connections."""
        del self._agent


def _import_nixl() -> Any:
    """NIXL's low-level bindings: its Python interface reconfigures logging and lets a thread spin."""
    for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):  # failures are logged here
        os.environ.setdefault(name, "FATAL")
    try:
        return importlib.import_module("nixl_cu12._bindings")
    except ImportError as error:
        raise ConfigError(
            f"kv_transfer nixl needs NIXL: pip install '.[nixl]' in Penstock's source folder ({error})"
        ) from None
