"""Packed weights, kept on disk so that later starts map them in place of packing again. No torch.

    folder (of this user alone)         a file
      KEY.packed   one model               8 bytes   magic
      KEY.lock     held while it is made   16        digest of the header
      KEY.tmp      being made              header    JSON: the key, each entry's parts, the digest of the pages' sums
      KEY.damaged  set aside               2 MiB on  parts, each from a page on, or from a cache line on if it is small

A key names content, recipe, dtype and code (`models/packed_key.py`), so a file never changes. Pages are mapped
privately and never written: all processes that map a file share its memory. Weights are packed into the pages of the
file that is being made, so that keeping them takes no copy. What is damaged (header, sizes, the sum of any page) is set
aside and made anew. Files that were not used for longest go where the folder would outgrow its bound.
"""

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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.reserve import FileArena, aligned, ask_for_huge_pages

if TYPE_CHECKING:  # a file is looked for before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

_MAGIC = b"PENSTOCK"
_VERSION = 2
_PAGE = 4096
_DIGEST_BYTES = 16
_START_BYTES = len(_MAGIC) + _DIGEST_BYTES
_HEADER_BYTES = 2 * 2**20
"""A huge page, so that the parts, too, begin at one."""
_CHUNK = 2**18
"""Bytes read at a time."""
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
            header = _read_header(file.read(_HEADER_BYTES), key)
            # private, so that torch takes it; it is never written
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            ask_for_huge_pages(pages)  # pages that are not in memory yet are then read as such
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
    def locked(self, key: str, seconds: float | None = None) -> Iterator[bool]:
        """Within, no other process packs the same model; False: it may not be kept, as another one takes too long.

        Args:
            seconds: how long to wait for that one; default: `_LOCK_SECONDS`.
        """
        try:
            self._make_folder()
            # a plain number: nothing is read from or written to it
            lock = os.open(self._path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            log.info("packed weights are not kept: %s", error)
            yield False
            return
        try:
            yield self._is_ours() and _lock(lock, _LOCK_SECONDS if seconds is None else seconds)
        finally:
            os.close(lock)

    def begin(self, key: str, size: int) -> "Draft | None":
        """Begin the file of a model whose packed weights take about `size` bytes; the key must be `locked`.

        None if there is no room for it.
        """
        try:
            if not self._make_room(_HEADER_BYTES + size, key):
                return None
            return Draft(self._path(key), key, size)
        except OSError as error:
            log.warning("packed weights cannot be kept in %s: %s", self._folder, error)
            return None

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


class Draft:
    """The file of a model that is being packed, into memory that is the file's pages. Gone at the end if not finished.

    Raises:
        OSError: there is no room on the disk, or its files cannot be mapped.
    """

    def __init__(self, path: Path, key: str, size: int) -> None:
        self.key = key
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
        """Complete the file with these entries, which lie in `arena` or are copied; False if that fails."""
        try:
            self._finish(entries)
        except OSError as error:
            log.warning("packed weights could not be kept in %s: %s", self._path.parent, error)
            return False
        return True

    def close(self) -> None:
        """The memory stays as long as what was taken of it."""
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
            places = []
            for part in entry.parts:
                place = self.arena.place_of(part)
                if place is None:
                    place = aligned(end, part.nbytes)
                    end = place + part.nbytes
                    elsewhere.append((place, part))
                places.append((place, part.nbytes))
            layout[name] = (entry.form, places)
        size = _round_up(end, _PAGE)
        os.ftruncate(self._file, size)
        os.posix_fallocate(self._file, 0, size)
        for place, part in elsewhere:
            _write_all(self._file, place, part)
        header = {"version": _VERSION, "key": self.key, "entries": layout, "bytes": size}
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
    place = _START_BYTES
    while place < _HEADER_BYTES:
        digest.update(text)
        _write_all(file, place, np.frombuffer(text, np.uint8))
        place += len(text)
        text = b" " * min(_PAGE, _HEADER_BYTES - place)
    _write_all(file, 0, np.frombuffer(_MAGIC + digest.digest(), np.uint8))


def _write_all(file: int, place: int, part: "Bytes") -> None:
    view = part.data
    while view.nbytes:
        written = os.pwrite(file, view, place)
        place, view = place + written, view[written:]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


_FOUND: ContextVar[PackedFile | None] = ContextVar("packed weights", default=None)
"""What `startup` found before torch was imported, whose check runs meanwhile."""
_BEGUN: ContextVar[Draft | None] = ContextVar("packed weights that are made", default=None)
"""What `startup` began where it found none."""


@contextlib.contextmanager
def opened(found: PackedFile | None, begun: Draft | None) -> Iterator[None]:
    """Within, `find` need not open the file again, and `begun_for` finds the draft."""
    tokens = _FOUND.set(found), _BEGUN.set(begun)
    try:
        yield
    finally:
        _FOUND.reset(tokens[0])
        _BEGUN.reset(tokens[1])


def begun_for(key: str) -> Draft | None:
    """The draft that `startup` began for a model, whose key it has locked."""
    draft = _BEGUN.get()
    return draft if draft is not None and draft.key == key else None


def find(cache: PackedCache, key: str) -> PackedFile | None:
    """The model of a key, whole; None where there is none. One with damaged pages is set aside."""
    found = _FOUND.get()
    if found is None or found.key != key or not found.path.exists():
        found = cache.open(key)
    if found is not None and not found.is_whole():
        cache.set_aside(key, "has damaged pages")
        return None
    return found
