"""Packed weights, kept on disk so that later starts map them in place of packing again. No torch.

    folder (of this user alone)         a file
      KEY.packed   one model               8 bytes   magic
      KEY.lock     held while it is made   8 + 16    length and digest of the header
      KEY.damaged  set aside               header    JSON: the key, each entry's parts, the digest of the pages' sums
                                           parts     each from a page on, or from a cache line on if it is small

A key names content, recipe, dtype and code (`models/packed_key.py`), so a file never changes. Pages are mapped
privately and never written: all processes that map a file share its memory. What is damaged (header, sizes, the sum of
any page) is set aside and made anew. Files that were not used for longest go where the folder would outgrow its bound.
"""

import bisect
import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a file is looked for before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

_MAGIC = b"PENSTOCK"
_VERSION = 1
_PAGE = 4096
_LINE = 64
_DIGEST_BYTES = 16
_MAX_HEADER_BYTES = 64 * 2**20
_CHUNK = 2 * 2**20
"""Bytes read or written at a time: a huge page, so that the system holds the file in such."""
_LOCK_SECONDS = 300.0
"""How long a process waits for another one that packs the same, before it packs for itself."""
_MOST_BYTES = 64 * 2**30
_SHARE = 4
"""The folder holds at most this part of the disk's free space and its own, and at most `_MOST_BYTES`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A weight as it is packed."""

    form: str
    """The format of its parts, which the packing code defines."""
    parts: "tuple[Bytes, ...]"


class DamagedError(Exception):
    """A cached file is damaged, or of another kind."""


class PackedFile:
    """The entries of a model, mapped.

    Raises:
        DamagedError: the header is not that of the key, or does not fit the file.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, key: str) -> None:
        import numpy as np

        self.path, self.key = path, key
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or os.fstat(file.fileno()).st_uid != os.geteuid():
                raise DamagedError("is not a file of this user")
            header, self._first = _read_header(file.read(8 + 8 + _DIGEST_BYTES), file.read, key)
            # private, so that torch takes it; it is never written
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # pages that are not in memory yet are read as huge pages
                with contextlib.suppress(OSError):  # a kernel without them
                    pages.madvise(mmap.MADV_HUGEPAGE)
            self._bytes: Bytes = np.frombuffer(pages, np.uint8)
        if len(self._bytes) != header["bytes"]:
            raise DamagedError(f"has {len(self._bytes)} bytes, not {header['bytes']}")
        self._sums = str(header["sums"])
        self._entries = {
            name: Entry(form, tuple(self._bytes[first : first + count] for first, count in parts))
            for name, (form, parts) in header["entries"].items()
        }
        self._check: threading.Thread | None = None
        self._is_whole = False

    def get(self, name: str) -> Entry | None:
        """The entry of a weight, if there is one."""
        return self._entries.get(name)

    def begin_check(self) -> None:
        """Compare the sums of all pages with what they should be, in a thread; it reads the whole file."""
        self._check = threading.Thread(target=self._compare_sums, name="packed weights", daemon=True)
        self._check.start()

    def is_whole(self) -> bool:
        """Whether all pages are as they were written; waits for the check."""
        if self._check is None:
            self.begin_check()
        assert self._check is not None
        self._check.join()
        return self._is_whole

    def _compare_sums(self) -> None:
        chunks = (self._bytes[at : at + _CHUNK] for at in range(self._first, len(self._bytes), _CHUNK))
        self._is_whole = _digest(map(_page_sums, chunks)) == self._sums


def _read_header(start: bytes, read: Any, key: str) -> tuple[dict[str, Any], int]:
    """The header, and where the parts begin."""
    count = int.from_bytes(start[8:16], "little")
    if start[:8] != _MAGIC or len(start) < 16 + _DIGEST_BYTES or count > _MAX_HEADER_BYTES:
        raise DamagedError("does not begin as such a file does")
    text: bytes = read(count)
    if hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() != start[16:]:
        raise DamagedError("has a header that is damaged or cut short")
    header: dict[str, Any] = json.loads(text)
    if (header["version"], header["key"]) != (_VERSION, key):
        raise DamagedError("is of another version or another model")
    return header, _round_up(len(start) + count, _PAGE)


def _page_sums(chunk: "Bytes") -> "NDArray[np.uint64]":
    """The sum of each page's words. Summing runs at the memory's speed, hashing at a tenth of it."""
    import numpy as np

    sums: NDArray[np.uint64] = chunk.view(np.uint64).reshape(-1, _PAGE // 8).sum(1, dtype=np.uint64)
    return sums


def _digest(sums: "Iterable[NDArray[np.uint64]]") -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in sums:
        digest.update(part.tobytes())
    return digest.hexdigest()


class PackedCache:
    """A folder of packed models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, key: str) -> PackedFile | None:
        """The model of a key, mapped, its pages not yet checked; None where there is none, or one that is damaged."""
        path = self._path(key)
        if not path.exists() or not self._is_ours():
            return None
        try:
            found = PackedFile(path, key)
            os.utime(path)
            return found
        except (DamagedError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.set_aside(key, str(error))
        except OSError as error:
            log.warning("%s cannot be read (%s): the weights are packed anew", path, error)
        return None

    def set_aside(self, key: str, reason: str) -> None:
        """Take a damaged file out of use; it stays until its room is needed."""
        path = self._path(key)
        log.warning("%s %s: it is set aside, and the weights are packed anew", path, reason)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".damaged"))

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[bool]:
        """Within, no other process packs the same model; False: it may not be kept, as another one takes too long."""
        try:
            self._make_folder()
            # a plain number: nothing is read from or written to it
            lock = os.open(self._path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.info("packed weights are not kept: %s", error)
            yield False
            return
        try:
            yield self._is_ours() and _lock(lock)
        finally:
            os.close(lock)

    def write(self, key: str, entries: Mapping[str, Entry]) -> bool:
        """Store a model; False if there is no room for it. The key must be `locked`."""
        layout, total = _lay_out(entries)
        header = {"version": _VERSION, "key": key, "sums": "0" * 2 * _DIGEST_BYTES, "entries": layout, "bytes": 0}
        first = _round_up(16 + _DIGEST_BYTES + len(json.dumps(header)) + 24, _PAGE)
        for _, parts in layout.values():
            for part in parts:
                part[0] += first
        header["bytes"] = first + total
        temporary = self._path(key).with_suffix(".tmp")  # one that is left was its owner's who died
        try:
            if not self._make_room(first + total, key):
                return False
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            _write_file(temporary, header, first, entries, layout)
            temporary.replace(self._path(key))
        except OSError as error:
            log.warning("packed weights could not be kept in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        return True

    def _path(self, key: str) -> Path:
        assert re.fullmatch("[0-9a-f]+", key)
        return self._folder / f"{key}.packed"

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _is_ours(self) -> bool:
        """Whether no other user may write to this folder."""
        found = self._folder.stat()
        if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return True
        log.warning("%s is another user's, or others may write to it: packed weights are not kept there", self._folder)
        return False

    def _make_room(self, needed: int, key: str) -> bool:
        """Remove what was not used for longest until `needed` bytes fit the folder's bound."""
        files = [file for file in self._folder.iterdir() if file.suffix in (".packed", ".damaged")]
        found = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in files if file.stem != key)
        held = sum(size for _, size, _ in found)
        bound = min(_MOST_BYTES, (shutil.disk_usage(self._folder).free + held) // _SHARE)
        if needed > bound:
            log.info("packed weights are not kept: %d bytes, of at most %d in %s", needed, bound, self._folder)
            return False
        for _, size, file in found:
            if held + needed <= bound:
                break
            file.unlink(missing_ok=True)
            held -= size
        return True


def _lock(lock: int) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while not _try_lock(lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lay_out(entries: Mapping[str, Entry]) -> tuple[dict[str, tuple[str, list[list[int]]]], int]:
    """Each entry's form and parts, as first byte and bytes, after one another; and how many bytes they take."""
    layout: dict[str, tuple[str, list[list[int]]]] = {}
    at = 0
    for name, entry in entries.items():
        parts = []
        for part in entry.parts:
            at = _round_up(at, _PAGE if part.nbytes >= _PAGE else _LINE)
            parts.append([at, part.nbytes])
            at += part.nbytes
        layout[name] = (entry.form, parts)
    return layout, _round_up(max(at, 1), _PAGE)


def _write_file(
    path: Path,
    header: dict[str, Any],
    first: int,
    entries: Mapping[str, Entry],
    layout: Mapping[str, tuple[str, Sequence[Sequence[int]]]],
) -> None:
    import numpy as np

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(file, 0, header["bytes"])  # a full disk says so here, not when pages are written back
        places = [place for _, parts in layout.values() for place, _ in parts]
        content = [part for entry in entries.values() for part in entry.parts]

        sums = np.empty(header["bytes"] // _PAGE, np.uint64)

        def write_every_second_chunk(begin: int) -> None:
            memory = np.empty(_CHUNK, np.uint8)  # of all chunks: new memory would cost more than what is copied to it
            for at in range(begin, header["bytes"], 2 * _CHUNK):
                chunk = _bytes_at(places, content, at, memory[: header["bytes"] - at])
                sums[at // _PAGE :][: len(chunk) // _PAGE] = _page_sums(chunk)
                _write_all(file, at, chunk)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write_every_second_chunk, (0, _CHUNK)))
        text = json.dumps(header | {"sums": _digest([sums[first // _PAGE :]])}).encode()
        digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
        start = _MAGIC + len(text).to_bytes(8, "little") + digest + text
        assert len(start) <= first
        _write_all(file, 0, np.frombuffer(start.ljust(first, b"\0"), np.uint8))
    finally:
        os.close(file)


def _bytes_at(places: Sequence[int], content: "Sequence[Bytes]", first: int, room: "Bytes") -> "Bytes":
    """As many bytes as `room` has, from `first` on of a file with `content` at `places`, which ascend; zeros between.

    They are part of a content that has them all, else gathered in `room`.
    """
    last, index = first + len(room), max(bisect.bisect_right(places, first) - 1, 0)
    if places and places[index] <= first and last <= places[index] + content[index].nbytes:
        return content[index][first - places[index] : last - places[index]]
    room[:] = 0
    for place, part in zip(places[index:], content[index:], strict=True):
        if place >= last:
            break
        part = part[max(first - place, 0) : last - place]
        place = max(place - first, 0)
        room[place : place + len(part)] = part
    return room


def _write_all(file: int, place: int, part: "Bytes") -> None:
    view = part.data
    while view.nbytes:
        written = os.pwrite(file, view, place)
        place, view = place + written, view[written:]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


_OPENED: ContextVar[PackedFile | None] = ContextVar("packed weights", default=None)
"""What `startup` found before torch was imported, whose check runs meanwhile."""


@contextlib.contextmanager
def opened(file: PackedFile | None) -> Iterator[None]:
    """Within, `find` need not open the file again."""
    token = _OPENED.set(file)
    try:
        yield
    finally:
        _OPENED.reset(token)


def find(cache: PackedCache, key: str) -> PackedFile | None:
    """The model of a key, whole; None where there is none. One with damaged pages is set aside."""
    found = _OPENED.get()
    if found is None or found.key != key or not found.path.exists():
        found = cache.open(key)
    if found is not None and not found.is_whole():
        cache.set_aside(key, "has damaged pages")
        return None
    return found
