"""Cache of packed weights on disk: later starts map them instead of packing again. No torch.

    folder (of this user alone)            a file
      KEY.packed   one model                  8 bytes   magic
      KEY.lock     locked while it is packed  16        digest of the header
      KEY.tmp      being written              header    JSON: the key, each entry's parts, the digest of the page sums
      KEY.damaged  a damaged file             2 MiB on  parts, aligned to a page, or to a cache line if small

A key names content, recipe, dtype and code (`models/loading/packed_key.py`), so a file never changes. Pages are mapped
privately and never written: all processes that map a file share its memory. Weights are packed into the mapped pages
of the new file, so that storing them takes no copy. A damaged file (header, size or any page sum) is renamed to
KEY.damaged and rebuilt. When the folder would exceed its limit, the least recently used files are deleted.
"""

import contextlib
import fcntl
import functools
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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.system.allocator import FileArena, aligned, ask_for_huge_pages

if TYPE_CHECKING:  # a file is looked for before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

_MAGIC = b"PENSTOCK"
_VERSION = 3
_PAGE = 4096
_DIGEST_BYTES = 16
_START_BYTES = len(_MAGIC) + _DIGEST_BYTES
_HEADER_BYTES = 2 * 2**20
"""A huge page, so that the parts, too, begin at one."""
_CHUNK = 2**18
"""Bytes read at a time."""
_WEIGHT = 6364136223846793005
"""Base of the weights in a page's sum: odd, so that each bit of each word changes the sum."""
_LOCK_SECONDS = 300.0
"""Seconds to wait for another process that packs the same model, before packing without storing the result."""
_MAX_BYTES = 64 * 2**30
_FREE_SPACE_DIVISOR = 4
"""The folder may use 1 / `_FREE_SPACE_DIVISOR` of the disk's free space plus its own size, and at most `_MAX_BYTES`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A packed weight."""

    form: str
    """The format of its parts, which the packing code defines."""
    parts: "tuple[Bytes, ...]"


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the cache's folder."""

    path: Path
    size: int
    """Bytes."""
    used: float
    """When it was last opened or written, in seconds since 1970."""
    about: str
    """Description of the model whose weights it holds."""


class DamagedError(Exception):
    """A cached file is damaged, or is no packed file of this cache."""


class PackedFile:
    """The mapped packed weights of a model.

    Raises:
        DamagedError: the header is damaged, or is not that of the key, or does not match the file's size.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, key: str) -> None:
        import numpy as np

        self.path, self.key = path, key
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or os.fstat(file.fileno()).st_uid != os.geteuid():
                raise DamagedError("is not a file of this user")
            header = _read_header(file.read(_HEADER_BYTES), key)
            # private, so that torch takes it; it is never written
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            ask_for_huge_pages(pages)  # pages not in memory yet are then read as huge pages
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
        """Verify the sums of all pages in a thread, which reads the whole file."""
        self._check = threading.Thread(target=self._compare_sums, name="packed weights", daemon=True)
        self._check.start()

    def is_whole(self) -> bool:
        """Whether all pages match their sums; waits for the check."""
        if self._check is None:
            self.begin_check()
        assert self._check is not None
        self._check.join()
        return self._is_whole

    def _compare_sums(self) -> None:
        chunks = (self._bytes[at : at + _CHUNK] for at in range(_HEADER_BYTES, len(self._bytes), _CHUNK))
        self._is_whole = _digest(map(_page_sums, chunks)) == self._sums


def _read_header(start: bytes, key: str) -> dict[str, Any]:
    if not start.startswith(_MAGIC):
        raise DamagedError("does not begin as such a file does")
    digest, text = start[len(_MAGIC) : _START_BYTES], start[_START_BYTES:]
    if hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() != digest:
        raise DamagedError("has a header that is damaged or cut short")
    header: dict[str, Any] = json.loads(text)
    if (header["version"], header["key"]) != (_VERSION, key):
        raise DamagedError("is of another version or another model")
    return header


def _page_sums(chunk: "Bytes") -> "NDArray[np.uint64]":
    """The sum of each page's 64-bit words, weighted by powers of `_WEIGHT`, modulo 2^64.

    Summing is limited by memory bandwidth, hashing ten times as slow. Two words of a page that changed places change
    the sum unless they differ in their ten highest bits alone.
    """
    import numpy as np

    sums: NDArray[np.uint64] = np.einsum("ij,j->i", chunk.view(np.uint64).reshape(-1, _PAGE // 8), _page_weights())
    return sums


@functools.cache
def _page_weights() -> "NDArray[np.uint64]":
    import numpy as np

    return np.cumprod(np.full(_PAGE // 8, _WEIGHT, np.uint64), dtype=np.uint64)


def _digest(sums: "Iterable[NDArray[np.uint64]]") -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in sums:
        digest.update(part.tobytes())
    return digest.hexdigest()


class WeightCache:
    """A folder of packed models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, key: str) -> PackedFile | None:
        """Map the model of a key without verifying its pages; None if there is none, or if its header is damaged."""
        path = self._path(key)
        try:
            if not path.exists() or not self._is_ours():
                return None
            found = PackedFile(path, key)
            os.utime(path)
            return found
        except (DamagedError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.set_aside(key, str(error))
        except OSError as error:
            log.warning("%s cannot be read (%s): the weights are packed anew", path, error)
        return None

    def find(self, key: str, opened: PackedFile | None = None) -> PackedFile | None:
        """The verified file of a key; None if there is none. A damaged one is set aside.

        Args:
            opened: a file that is being verified already; used if it is the key's.
        """
        found = opened
        if found is None or found.key != key or not found.path.exists():
            found = self.open(key)
        if found is not None and not found.is_whole():
            self.set_aside(key, "has damaged pages")
            return None
        return found

    def set_aside(self, key: str, reason: str) -> None:
        """Rename a damaged file to KEY.damaged; it is deleted when its space is needed."""
        path = self._path(key)
        log.warning("%s %s: it is set aside, and the weights are packed anew", path, reason)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".damaged"))

    @contextlib.contextmanager
    def locked(self, key: str, seconds: float | None = None) -> Iterator[bool]:
        """Context in which no other process packs the model; yields False if it cannot be cached, or waited too long.

        Args:
            seconds: how long to wait for another process that packs it; None: `_LOCK_SECONDS`.
        """
        try:
            self._make_folder()
            # a plain number: nothing is read from or written to it
            lock = os.open(self._path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.warning("packed weights cannot be kept in %s: %s", self._folder, error)
            yield False
            return
        try:
            yield self._is_ours() and _lock(lock, _LOCK_SECONDS if seconds is None else seconds)
        finally:
            os.close(lock)

    def begin(self, key: str, size: int, about: str = "") -> "PackedFileWriter | None":
        """A writer for a model of about `size` bytes of packed weights; None if it exceeds the folder's limit.

        The key must be `locked`. `about` describes the model, for `files`.
        """
        try:
            if not self._make_room(_HEADER_BYTES + size, key):
                return None
            return PackedFileWriter(self._path(key), key, size, about)
        except OSError as error:
            log.warning("packed weights cannot be kept in %s: %s", self._folder, error)
            return None

    def files(self) -> list[CachedFile]:
        """All files, including damaged and unfinished ones; most recently used first.

        Raises:
            OSError: the folder cannot be read.
        """
        found = []
        for file in self._folder.iterdir() if self._folder.exists() else ():
            if re.fullmatch(r"[0-9a-f]+\.(packed|damaged|tmp)", file.name):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    status = file.lstat()
                    found.append(CachedFile(file, status.st_size, status.st_mtime, _about(file)))
        return sorted(found, key=lambda one: -one.used)

    def clear(self) -> list[CachedFile]:
        """Delete all files except those being written, and return them; servers that map one keep it until they end.

        Raises:
            OSError: a file cannot be deleted.
        """
        if self._folder.exists():
            self._remove_abandoned()
        deleted = [file for file in self.files() if file.path.suffix != ".tmp"]
        for file in deleted:
            file.path.unlink(missing_ok=True)
        return deleted

    def limit(self) -> int:
        """Maximum total bytes of its files, from the current free disk space.

        Raises:
            OSError: the folder is missing.
        """
        return self._bound(sum(file.size for file in self.files() if file.path.suffix != ".tmp"))

    def _bound(self, held: int) -> int:
        return min(_MAX_BYTES, (shutil.disk_usage(self._folder).free + held) // _FREE_SPACE_DIVISOR)

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
        """Delete least recently used files until `needed` bytes fit the folder's limit; False if they never fit."""
        self._remove_abandoned()
        files = [file for file in self._folder.iterdir() if file.suffix in (".packed", ".damaged")]
        found = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in files if file.stem != key)
        held = sum(size for _, size, _ in found)
        bound = self._bound(held)
        if needed > bound:
            log.warning("packed weights are not kept: %d bytes, of at most %d in %s", needed, bound, self._folder)
            return False
        for _, size, file in found:
            if held + needed <= bound:
                break
            file.unlink(missing_ok=True)
            held -= size
        return True

    def _remove_abandoned(self) -> None:
        """Remove the unfinished files of processes that were killed: those whose key no process has locked."""
        for file in self._folder.glob("*.tmp"):
            lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                if _try_lock(lock):
                    file.unlink(missing_ok=True)
            finally:
                os.close(lock)


def _about(file: Path) -> str:
    """Description of the model whose weights a file holds."""
    if file.suffix != ".packed":
        return "damaged" if file.suffix == ".damaged" else "being written"
    try:
        with file.open("rb") as opened:
            return str(_read_header(opened.read(_HEADER_BYTES), file.stem).get("about") or "a model")
    except (DamagedError, OSError, ValueError, LookupError):
        return "of another version of Penstock, or damaged"


def _lock(lock: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
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


class PackedFileWriter:
    """Writes a packed file: weights are packed directly into its mapped pages. Deleted on `close` unless finished.

    Raises:
        OSError: the disk is full, or its files cannot be mapped.
    """

    def __init__(self, path: Path, key: str, size: int, about: str = "") -> None:
        self.key = key
        self._about = about
        self._path = path
        self._temporary = path.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()  # its owner died
        self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            size = _round_up(max(size, 1), _PAGE)
            # a full disk says so here, not when pages are written back
            os.posix_fallocate(self._file, 0, _HEADER_BYTES + size)
            self.arena = FileArena(self._file, _HEADER_BYTES, size)
        except OSError:
            self._end()
            raise

    def finish(self, entries: Mapping[str, Entry]) -> bool:
        """Complete the file; entries that do not lie in `arena` are copied. False if that fails."""
        try:
            self._finish(entries)
        except OSError as error:
            log.warning("packed weights could not be kept in %s: %s", self._path.parent, error)
            return False
        return True

    def close(self) -> None:
        """Close the file. Its mapping lives as long as arrays allocated from it."""
        del self.arena
        self._end()

    def _end(self) -> None:
        os.close(self._file)
        with contextlib.suppress(OSError):  # finished, or a folder that is gone
            self._temporary.unlink()

    def _finish(self, entries: Mapping[str, Entry]) -> None:
        end, elsewhere = self.arena.end, []
        layout: dict[str, tuple[str, list[tuple[int, int]]]] = {}
        for name, entry in entries.items():
            spans = []
            for part in entry.parts:
                offset = self.arena.offset_of(part)
                if offset is None:
                    offset = aligned(end, part.nbytes)
                    end = offset + part.nbytes
                    elsewhere.append((offset, part))
                spans.append((offset, part.nbytes))
            layout[name] = (entry.form, spans)
        size = _round_up(end, _PAGE)
        os.ftruncate(self._file, size)
        os.posix_fallocate(self._file, 0, size)
        for offset, part in elsewhere:
            _write_all(self._file, offset, part)
        header = {"version": _VERSION, "key": self.key, "about": self._about, "entries": layout, "bytes": size}
        _write_header(self._file, header | {"sums": _file_sums(self._file, size)})
        self._temporary.replace(self._path)


def _file_sums(file: int, size: int) -> str:
    """The digest of the sums of all pages of weights."""
    import numpy as np

    sums = np.empty((size - _HEADER_BYTES) // _PAGE, np.uint64)

    def sum_every_second_chunk(begin: int) -> None:
        memory = np.empty(_CHUNK, np.uint8)  # of all chunks: new memory would cost more than what is copied to it
        for at in range(begin, size - _HEADER_BYTES, 2 * _CHUNK):
            count = os.preadv(file, [memory[: size - _HEADER_BYTES - at].data], _HEADER_BYTES + at)
            sums[at // _PAGE :][: count // _PAGE] = _page_sums(memory[:count])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sum_every_second_chunk, (0, _CHUNK)))
    return _digest([sums])


def _write_header(file: int, header: dict[str, Any]) -> None:
    import numpy as np

    text = json.dumps(header).encode()
    if len(text) > _HEADER_BYTES - _START_BYTES:
        raise OSError(f"the model has too many weights: their list takes {len(text)} bytes")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    offset = _START_BYTES
    while offset < _HEADER_BYTES:
        digest.update(text)
        _write_all(file, offset, np.frombuffer(text, np.uint8))
        offset += len(text)
        text = b" " * min(_PAGE, _HEADER_BYTES - offset)
    _write_all(file, 0, np.frombuffer(_MAGIC + digest.digest(), np.uint8))


def _write_all(file: int, offset: int, part: "Bytes") -> None:
    view = part.data
    while view.nbytes:
        written = os.pwrite(file, view, offset)
        offset, view = offset + written, view[written:]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
