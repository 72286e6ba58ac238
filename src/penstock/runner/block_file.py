"""A file of KV blocks: slots of one size, and for each a record of what lies in it.

    header (4 KiB)     magic, and as JSON: fingerprint, mark, sizes
    records            num_slots of: CRC-32 of the rest, depth, digest, parent's digest, tick, cache groups, tokens, and
                       of each cache group a checksum
    slots              num_slots of: of each cache group a block's bytes, all layers in one piece; from a page on

A slot is what its record says if the record's CRC and a block's checksum agree; nothing else is relied on, neither
the order in which pages reach the disk nor that a writer got to its end. So damage costs a block.
"""

import contextlib
import fcntl
import json
import os
import secrets
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.core.stored_blocks import DIGEST_BYTES, Record
from penstock.errors import ConfigError

MAGIC = b"penstock KV blocks 1\n"
PAGE = 4096
MAX_SHARERS = 64
"""Engines that may take files beside each other under one path."""
_FACTS = struct.Struct(f"<I{DIGEST_BYTES}s{DIGEST_BYTES}sQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry and identity of a file's slots."""

    fingerprint: str
    """Digest of all that the bits of keys and values depend on, beside the tokens."""
    group_bytes: tuple[int, ...]
    """Bytes of a block, by cache group."""
    key_bytes: int
    """Bytes of a block's tokens."""

    @property
    def record_bytes(self) -> int:
        return _CRC.size + _FACTS.size + self.key_bytes + 8 * len(self.group_bytes)

    @property
    def stride(self) -> int:
        """From one slot to the next."""
        return -(-sum(self.group_bytes) // PAGE) * PAGE

    def num_slots(self, size: int) -> int:
        """How many slots a file of so many bytes has."""
        return max(0, (size - 2 * PAGE) // (self.stride + self.record_bytes))

    def first_slot(self, num_slots: int) -> int:
        """Where slot 0 begins."""
        return PAGE + -(-num_slots * self.record_bytes // PAGE) * PAGE


class ReadAt(Protocol):
    """Reads a part of a file, wherever that is."""

    def __call__(self, place: int, room: memoryview, /) -> bool:
        """Fill `room` with what begins at a byte of the file; False: it ends before.

        Raises:
            OSError: it could not be read.
        """


class BlockSlots:
    """The slots of a file that another engine writes. Several threads may read them."""

    def __init__(self, read: ReadAt, layout: Layout, num_slots: int, mark: str) -> None:
        self.layout, self.num_slots, self.mark = layout, num_slots, mark
        self._read = read

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return _size(self.layout, self.num_slots)

    def read_block(self, slot: int, group: int, digest: bytes, key: bytes, block: memoryview) -> bool:
        """Fill `block` from its group's part of a slot; whether it is that of this path and these tokens, undamaged.

        Raises:
            OSError: the file could not be read.
        """
        if not 0 <= slot < self.num_slots:
            return False
        data = bytearray(self.layout.record_bytes)
        if not self._read(PAGE + slot * len(data), memoryview(data)):
            return False
        record, checksums = self._parse(slot, data)
        if record is None or record.digest != digest or record.key != key or not record.groups >> group & 1:
            return False
        return self._read(self._place(slot, group), block) and checksum_of(block) == checksums[group]

    def _parse(self, slot: int, data: bytes | bytearray) -> tuple[Record | None, tuple[int, ...]]:
        """A record and its blocks' checksums; None if it is damaged or was never written."""
        if len(data) < self.layout.record_bytes or _CRC.unpack_from(data)[0] != zlib.crc32(data[_CRC.size :]):
            return None, ()
        depth, digest, parent, tick, groups = _FACTS.unpack_from(data, _CRC.size)
        first, last = _CRC.size + _FACTS.size, _CRC.size + _FACTS.size + self.layout.key_bytes
        checksums = struct.unpack_from(f"<{len(self.layout.group_bytes)}Q", data, last)
        return Record(slot, digest, parent, depth, bytes(data[first:last]), tick, groups), checksums

    def _place(self, slot: int, group: int) -> int:
        layout = self.layout
        return layout.first_slot(self.num_slots) + slot * layout.stride + sum(layout.group_bytes[:group])


class BlockFile(BlockSlots):
    """An open file. Reading and writing of different slots may go on in several threads."""

    def __init__(self, descriptor: int, layout: Layout, num_slots: int, mark: str) -> None:
        super().__init__(reading(descriptor), layout, num_slots, mark)
        self.descriptor = descriptor

    def records(self) -> Iterator[Record]:
        """The records of the file's slots; damaged ones are left out."""
        size = self.layout.record_bytes
        data = os.pread(self.descriptor, self.num_slots * size, PAGE)
        for slot in range(len(data) // size):
            record, _ = self._parse(slot, data[slot * size : (slot + 1) * size])
            if record is not None:
                yield record

    def write_block(self, slot: int, group: int, block: memoryview) -> int:
        """Write a block's bytes to its group's part of a slot; their checksum.

        Raises:
            OSError: they could not be written.
        """
        checksum = checksum_of(block)
        place = self._place(slot, group)
        while block:
            written = os.pwrite(self.descriptor, block, place)
            block, place = block[written:], place + written
        return checksum

    def write_record(self, record: Record, checksums: Sequence[int]) -> None:
        """Say what a slot holds.

        Raises:
            OSError: it could not be written.
        """
        facts = _FACTS.pack(record.depth, record.digest, record.parent, record.tick, record.groups) + record.key
        facts += struct.pack(f"<{len(self.layout.group_bytes)}Q", *checksums)
        data = _CRC.pack(zlib.crc32(facts)) + facts
        os.pwrite(self.descriptor, data, PAGE + record.slot * self.layout.record_bytes)

    def close(self) -> None:
        """Let go of the file, and of its lock."""
        os.close(self.descriptor)


def reading(descriptor: int) -> ReadAt:
    """Reads an open file."""

    def read(place: int, room: memoryview) -> bool:
        while room:
            count = os.preadv(descriptor, [room], place)
            if not count:
                return False
            room, place = room[count:], place + count
        return True

    return read


def checksum_of(block: memoryview) -> int:
    """64 bits: a CRC-32, and a sum of all words that is folded to as many. Both read at the memory's speed."""
    words = np.frombuffer(block[: len(block) // 8 * 8], np.uint64)
    total = int(words.sum())
    return (total ^ total >> 32) & 0xFFFFFFFF | zlib.crc32(block) << 32


def open_own(path: Path, layout: Layout, size: int) -> tuple[BlockFile, bool]:
    """The file at a path, made where there is none; whether what it held is of use. `size` is in bytes.

    Where another engine has it, the first free one of PATH.1, PATH.2, ... is taken.

    Raises:
        ConfigError: it cannot be opened or made, is something else, or `size` is below that of a block.
    """
    for index in range(MAX_SHARERS):
        candidate = path.with_name(f"{path.name}.{index}") if index else path
        try:
            descriptor = os.open(candidate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ConfigError(f"kv_disk {candidate} cannot be opened: {error.strerror}") from error
        try:
            if _lock(descriptor):
                return _take(descriptor, candidate, layout, size)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise ConfigError(f"kv_disk {path}: {MAX_SHARERS} engines have files under this path; name another one")


def _lock(descriptor: int) -> bool:
    """Lock the file until it is closed; False: another process has it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _take(descriptor: int, path: Path, layout: Layout, size: int) -> tuple[BlockFile, bool]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"kv_disk {path} is no file; name one that is, or is not there yet")
    num_slots = layout.num_slots(size)
    if not num_slots:
        least = 2 * PAGE + layout.stride + layout.record_bytes
        raise ConfigError(f"kv_disk {path} of {size} bytes has no room for a block, which takes {least}: give it more")
    head = os.pread(descriptor, PAGE, 0)
    if status.st_size and head[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"kv_disk {path} is not a file of KV blocks: name another one, or remove it")
    os.fchmod(descriptor, 0o600)
    facts = _facts(head)
    if facts is not None and (facts[0], facts[1]) == (layout, num_slots) and status.st_size >= _size(layout, num_slots):
        return BlockFile(descriptor, layout, num_slots, facts[2]), True
    return _begin(descriptor, layout, num_slots), False


def open_temporary(layout: Layout, size: int) -> BlockFile:
    """A file without a name, which is gone with the process.

    Raises:
        OSError: the folder for temporary files takes none.
    """
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    try:
        return _begin(descriptor, layout, layout.num_slots(size))
    except BaseException:
        os.close(descriptor)
        raise


def _begin(descriptor: int, layout: Layout, num_slots: int) -> BlockFile:
    """Begin a file anew. Its pages take no room until they are written."""
    mark = secrets.token_hex(16)
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, _size(layout, num_slots))
    facts = json.dumps({"mark": mark, "num_slots": num_slots, **asdict(layout)}).encode()
    os.pwrite(descriptor, (MAGIC + facts).ljust(PAGE, b"\0"), 0)
    return BlockFile(descriptor, layout, num_slots, mark)


def _size(layout: Layout, num_slots: int) -> int:
    return layout.first_slot(num_slots) + num_slots * layout.stride


def _facts(head: bytes) -> tuple[Layout, int, str] | None:
    """The contents of a file's header; None if it is damaged."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        facts = json.loads(head[len(MAGIC) :].rstrip(b"\0"))
        layout = Layout(facts["fingerprint"], tuple(facts["group_bytes"]), facts["key_bytes"])
        return layout, facts["num_slots"], facts["mark"]
    return None


def open_peer(path: str, mark: str, layout: Layout) -> BlockFile:
    """Another engine's file, to read.

    Raises:
        OSError: it is not there, or is another one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{path} is no file")
        return BlockFile(descriptor, layout, slots_of(reading(descriptor), mark, layout).num_slots, mark)
    except BaseException:
        os.close(descriptor)
        raise


def slots_of(read: ReadAt, mark: str, layout: Layout) -> BlockSlots:
    """The slots of another engine's file.

    Raises:
        OSError: it cannot be read, or is another one.
    """
    head = bytearray(PAGE)
    facts = _facts(bytes(head)) if read(0, memoryview(head)) and head.startswith(MAGIC) else None
    if facts is None or (facts[0], facts[2]) != (layout, mark):
        raise FileNotFoundError("this is not the file of blocks that the engine named")
    return BlockSlots(read, layout, facts[1], mark)
