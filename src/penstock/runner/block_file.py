"""A file of KV blocks: slots of one size, with a record of each slot's content.

    header (4 KiB)     magic, and as JSON: fingerprint, mark, sizes
    records            num_slots of: CRC-32 of the rest, depth, digest, parent's digest, tick, cache groups, tokens, the
                       digest of images (zeros if there is none) for a model that takes them, and one checksum per
                       cache group
    slots              num_slots of: one block per cache group, all layers in one piece; page-aligned

A slot is valid if its record's CRC and the block's checksum match; nothing else is assumed, neither the order in which
pages reach the disk nor that a write completed. So damage costs one block.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.core.stored_blocks import DIGEST_BYTES, Record
from penstock.dataclass import dataclass
from penstock.errors import ConfigError

MAGIC = b"penstock KV blocks 1\n"
PAGE = 4096
MAX_SHARERS = 64
"""Maximum number of engines with files under one path."""
_FACTS = struct.Struct(f"<I{DIGEST_BYTES}s{DIGEST_BYTES}sQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry and identity of a file's slots."""

    fingerprint: str
    """Digest of everything that determines the bits of keys and values, besides the tokens."""
    group_bytes: tuple[int, ...]
    """Bytes of a block, by cache group."""
    key_bytes: int
    """Bytes of a block's token ids."""
    content_bytes: int = 0
    """Bytes of the digest of a block's images, by which its key is longer; 0 for a model that takes text only."""

    @property
    def record_bytes(self) -> int:
        return _CRC.size + _FACTS.size + self.key_bytes + self.content_bytes + 8 * len(self.group_bytes)

    @property
    def stride(self) -> int:
        """Distance between slots in bytes."""
        return -(-sum(self.group_bytes) // PAGE) * PAGE

    def num_slots(self, size: int) -> int:
        """Number of slots in a file of `size` bytes."""
        return max(0, (size - 2 * PAGE) // (self.stride + self.record_bytes))

    def first_slot(self, num_slots: int) -> int:
        """Offset of slot 0."""
        return PAGE + -(-num_slots * self.record_bytes // PAGE) * PAGE


class ReadAt(Protocol):
    """Reads part of a file, local or remote."""

    def __call__(self, offset: int, room: memoryview, /) -> bool:
        """Fill `room` from an offset of the file; False: the file ends before.

        Raises:
            OSError: the read failed.
        """


class BlockSlots:
    """The slots of a file that another engine writes. Thread-safe for readers."""

    def __init__(self, read: ReadAt, layout: Layout, num_slots: int, mark: str) -> None:
        self.layout, self.num_slots, self.mark = layout, num_slots, mark
        self._read = read

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return _size(self.layout, self.num_slots)

    def read_block(self, slot: int, group: int, digest: bytes, key: bytes, block: memoryview) -> bool:
        """Fill `block` from its group's part of a slot; returns whether it is that path's and these tokens', undamaged.

        Raises:
            OSError: the file cannot be read.
        """
        if not 0 <= slot < self.num_slots:
            return False
        data = bytearray(self.layout.record_bytes)
        # The record is read again for each block: the other engine may have given the slot away since it was named.
        if not self._read(PAGE + slot * len(data), memoryview(data)):
            return False
        record, checksums = self._parse(slot, data)
        if record is None or record.digest != digest or record.key != key or not record.groups >> group & 1:
            return False
        return self._read(self._offset(slot, group), block) and checksum_of(block) == checksums[group]

    def _parse(self, slot: int, data: bytes | bytearray) -> tuple[Record | None, tuple[int, ...]]:
        """A record and its blocks' checksums; None if it is damaged or was never written."""
        if len(data) < self.layout.record_bytes or _CRC.unpack_from(data)[0] != zlib.crc32(data[_CRC.size :]):
            return None, ()
        depth, digest, parent, tick, groups = _FACTS.unpack_from(data, _CRC.size)
        first = _CRC.size + _FACTS.size
        middle, last = first + self.layout.key_bytes, first + self.layout.key_bytes + self.layout.content_bytes
        checksums = struct.unpack_from(f"<{len(self.layout.group_bytes)}Q", data, last)
        key = bytes(data[first : last if any(data[middle:last]) else middle])
        return Record(slot, digest, parent, depth, key, tick, groups), checksums

    def _offset(self, slot: int, group: int) -> int:
        layout = self.layout
        return layout.first_slot(self.num_slots) + slot * layout.stride + sum(layout.group_bytes[:group])


class BlockFile(BlockSlots):
    """An open file. Different slots may be read and written by several threads."""

    def __init__(self, descriptor: int, layout: Layout, num_slots: int, mark: str) -> None:
        super().__init__(reading(descriptor), layout, num_slots, mark)
        self.descriptor = descriptor

    def records(self) -> Iterator[Record]:
        """Records of the file's slots, except damaged ones."""
        size = self.layout.record_bytes
        data = os.pread(self.descriptor, self.num_slots * size, PAGE)
        for slot in range(len(data) // size):
            record, _ = self._parse(slot, data[slot * size : (slot + 1) * size])
            if record is not None:
                yield record

    def write_block(self, slot: int, group: int, block: memoryview) -> int:
        """Write a block to its group's part of a slot; returns its checksum.

        Raises:
            OSError: the write failed.
        """
        checksum = checksum_of(block)
        offset = self._offset(slot, group)
        # A disk that is nearly full takes a part.
        while block:
            written = os.pwrite(self.descriptor, block, offset)
            block, offset = block[written:], offset + written
        return checksum

    def write_record(self, record: Record, checksums: Sequence[int]) -> None:
        """Write a slot's record.

        Raises:
            OSError: the write failed.
        """
        key = record.key.ljust(self.layout.key_bytes + self.layout.content_bytes, b"\0")
        # The checksum covers the blocks' checksums, too: a record that is torn fits none of its blocks.
        facts = _FACTS.pack(record.depth, record.digest, record.parent, record.tick, record.groups) + key
        facts += struct.pack(f"<{len(self.layout.group_bytes)}Q", *checksums)
        data = _CRC.pack(zlib.crc32(facts)) + facts
        os.pwrite(self.descriptor, data, PAGE + record.slot * self.layout.record_bytes)

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self.descriptor)


def reading(descriptor: int) -> ReadAt:
    """Reads an open file."""

    def read(offset: int, room: memoryview) -> bool:
        while room:
            count = os.preadv(descriptor, [room], offset)
            if not count:
                return False
            room, offset = room[count:], offset + count
        return True

    return read


def checksum_of(block: memoryview) -> int:
    """64 bits: a CRC-32, and a folded sum of all words. Both run at memory speed."""
    words = np.frombuffer(block[: len(block) // 8 * 8], np.uint64)
    total = int(words.sum())
    return (total ^ total >> 32) & 0xFFFFFFFF | zlib.crc32(block) << 32


_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def open_own(path: Path, layout: Layout, size: int) -> tuple[BlockFile, bool]:
    """Open the file at a path, creating it if necessary; returns whether its content is usable. `size` is in bytes.

    If another engine uses it, the first free one of PATH.1, PATH.2, ... is opened.

    Raises:
        ConfigError: it cannot be opened or created, is a link, another user's or another kind of file, or `size` is
            below one block.
    """
    for index in range(MAX_SHARERS):
        candidate = path.with_name(f"{path.name}.{index}") if index else path
        try:
            descriptor = os.open(candidate, _OPEN_FLAGS, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(f"kv_disk {candidate} is a link; name the file itself") from error
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
    """Lock the file until it is closed; False: another process has locked it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _take(descriptor: int, path: Path, layout: Layout, size: int) -> tuple[BlockFile, bool]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"kv_disk {path} is not a regular file; name one, or a path that does not exist yet")
    if status.st_uid != os.geteuid():  # who could read the prompts in it, and write blocks
        raise ConfigError(f"kv_disk {path} belongs to another user: name another one, or remove it")
    num_slots = layout.num_slots(size)
    if not num_slots:
        least = 2 * PAGE + layout.stride + layout.record_bytes
        raise ConfigError(f"kv_disk {path} of {size} bytes has no room for a block, which takes {least}: give it more")
    head = os.pread(descriptor, PAGE, 0)
    if status.st_size and head[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"kv_disk {path} is not a file of KV blocks: name another one, or remove it")
    # An existing file may have been readable for others; it holds prompts.
    os.fchmod(descriptor, 0o600)
    facts = _facts(head)
    if facts is not None and (facts[0], facts[1]) == (layout, num_slots) and status.st_size >= _size(layout, num_slots):
        return BlockFile(descriptor, layout, num_slots, facts[2]), True
    return _begin(descriptor, layout, num_slots), False


def open_temporary(layout: Layout, size: int) -> BlockFile:
    """An unnamed file, which is deleted when the process ends.

    Raises:
        OSError: the folder for temporary files does not allow it.
    """
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    try:
        return _begin(descriptor, layout, layout.num_slots(size))
    except BaseException:
        os.close(descriptor)
        raise


def _begin(descriptor: int, layout: Layout, num_slots: int) -> BlockFile:
    """Reset a file. Its pages take no disk space until they are written."""
    # A new identity: peers that know the path must not read other blocks under the old one.
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
        group_bytes, content_bytes = tuple(facts["group_bytes"]), facts.get("content_bytes", 0)
        layout = Layout(facts["fingerprint"], group_bytes, facts["key_bytes"], content_bytes)
        return layout, facts["num_slots"], facts["mark"]
    return None


def open_peer(path: str, mark: str, layout: Layout) -> BlockFile:
    """Open another engine's file for reading.

    Raises:
        OSError: it does not exist, or is another file.
    """
    # Without blocking: at the path may be a pipe by now.
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
        OSError: it cannot be read, or is another file.
    """
    head = bytearray(PAGE)
    facts = _facts(bytes(head)) if read(0, memoryview(head)) and head.startswith(MAGIC) else None
    if facts is None or (facts[0], facts[2]) != (layout, mark):
        raise FileNotFoundError("this is not the file of blocks that the engine named")
    return BlockSlots(read, layout, facts[1], mark)
