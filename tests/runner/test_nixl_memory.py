"""Blocks in the memory of another process, by NIXL over TCP: what is read is right, or nothing is read."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from penstock.api.request import BlockSource, RemoteMemory
from penstock.core.block_writer import BlockAddress
from penstock.core.stored_blocks import path_digest, root_digest
from penstock.errors import ConfigError
from penstock.runner import nixl_memory
from penstock.runner.block_file import PAGE, BlockFile, Layout, open_peer
from penstock.runner.nixl_memory import RETRY_SECONDS, NixlMemory
from tests.runner.blocks import DIGEST, KEY, LAYOUT, put
from tests.support.needs import needs_nixl
from tests.support.waiting import stop, wait_until

pytestmark = needs_nixl

CONTENT = b"k" * 5000


@dataclass
class Peer:
    process: "subprocess.Popen[str]"
    source: BlockSource

    def open(self) -> BlockFile:
        """Its file, to write to."""
        descriptor = os.open(self.source.file, os.O_RDWR)
        file = open_peer(self.source.file, self.source.mark, LAYOUT)
        file.close()
        return BlockFile(descriptor, LAYOUT, file.num_slots, file.mark)


class Reader:
    """An engine's end, whose clock the test moves."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        self.now = 0.0
        self.memory = NixlMemory(layout, None, lambda: self.now)

    def get(
        self,
        source: BlockSource,
        digest: bytes = DIGEST,
        key: bytes = KEY,
        slot: int = 3,
        room: bytearray | None = None,
    ) -> bytes | None:
        room = bytearray(5000) if room is None else room
        address = BlockAddress(slot, digest, key, source)
        return bytes(room) if self.memory.fetch(source, address, 0, memoryview(room)) else None


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[None]:
    """As between machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@contextlib.contextmanager
def running_peer() -> Iterator[Peer]:
    command = [sys.executable, "-m", "tests.runner.nixl_peer"]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        offer = json.loads(process.stdout.readline())
        memory = RemoteMemory(bytes.fromhex(offer["agent"]), offer["address"])
        yield Peer(process, BlockSource(offer["file"], offer["mark"], ((3, 1),), memory))
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def peer(over_tcp: None) -> Iterator[Peer]:
    with running_peer() as peer:
        yield peer


@pytest.fixture
def stopped(peer: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """A process that has answered, and does no longer: what is asked of it takes too long."""
    assert reader.get(peer.source) is not None
    stop(peer.process.pid)
    monkeypatch.setattr(nixl_memory, "TRANSFER_SECONDS", -1.0)
    yield peer
    os.kill(peer.process.pid, signal.SIGCONT)


@pytest.fixture
def reader(over_tcp: None) -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.memory.close()


def test_a_block_is_read_from_another_process_if_it_is_the_one_and_undamaged(peer: Peer, reader: Reader) -> None:
    assert reader.get(peer.source) == CONTENT
    assert reader.get(peer.source, digest=path_digest(root_digest("other"), KEY)) is None, "of another namespace"
    assert reader.get(peer.source, key=bytes(8)) is None, "of other tokens"
    assert reader.get(peer.source, slot=4) is None
    assert reader.get(peer.source, slot=10_000) is None
    file = peer.open()
    put(file, content=b"m" * 5000)
    assert reader.get(peer.source) == b"m" * 5000
    for place in (LAYOUT.first_slot(file.num_slots) + 3 * LAYOUT.stride + 4999, PAGE + 3 * LAYOUT.record_bytes + 40):
        (byte,) = os.pread(file.descriptor, 1, place)
        os.pwrite(file.descriptor, bytes([byte ^ 4]), place)
        assert reader.get(peer.source) is None, "damaged"
        os.pwrite(file.descriptor, bytes([byte]), place)
    assert reader.get(peer.source) == b"m" * 5000
    file.close()
    other = Reader(replace(LAYOUT, fingerprint="other sums"))
    with pytest.raises(FileNotFoundError, match="not the file of blocks"):
        other.get(peer.source)
    other.memory.close()


def test_a_process_that_hangs_costs_time_once_and_is_asked_again_later(
    stopped: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = bytearray(5000)
    with pytest.raises(TimeoutError):
        reader.get(stopped.source, room=room)
    monkeypatch.undo()
    with pytest.raises(OSError, match="did not answer before"):
        reader.get(stopped.source)
    reader.now += RETRY_SECONDS
    with pytest.raises(OSError, match="did not answer before"):
        reader.get(stopped.source)  # what it was asked for may still come
    os.kill(stopped.process.pid, signal.SIGCONT)

    def answers() -> bool:
        try:
            return reader.get(stopped.source) is not None
        except OSError:
            return False

    wait_until(answers)
    assert room == bytes(5000), "what came too late went elsewhere"


def test_an_engine_ends_while_another_one_hangs(stopped: Peer, over_tcp: None) -> None:
    reader = Reader()
    with pytest.raises(TimeoutError):
        reader.get(stopped.source)
    reader.memory.close()


def test_transfers_that_hang_are_bounded(stopped: Peer, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_memory, "MAX_ROOMS", 1)
    with pytest.raises(TimeoutError):
        reader.get(stopped.source)
    with pytest.raises(OSError, match="too many transfers hang"):
        reader.get(replace(stopped.source, mark="another"))


def test_a_process_that_is_killed_amid_a_transfer_is_an_error_now_and_later(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_memory, "TRANSFER_SECONDS", 300.0)
    with running_peer() as peer, ThreadPoolExecutor(1) as threads:
        assert reader.get(peer.source) == CONTENT
        stop(peer.process.pid)
        reading = threads.submit(reader.get, peer.source)
        wait_until(lambda: any(peer.num_transfers for peer in reader.memory._peers.values()))
        peer.process.kill()
        with pytest.raises(ConnectionError):
            reading.result()
        reader.now += RETRY_SECONDS
        for _ in range(2):
            with pytest.raises(OSError):
                reader.get(peer.source)
            reader.now += RETRY_SECONDS


def test_without_nixl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[nixl\]'"):
        NixlMemory(LAYOUT, None)


def test_a_source_without_memory_is_an_error(reader: Reader) -> None:
    with pytest.raises(OSError, match="does not offer"):
        reader.get(BlockSource("", "mark", ((3, 1),)))
