"""The file of a model's packed weights, which later starts map instead of packing again. No torch.

    8 bytes   magic
    16        digest of the header
    header    JSON: the key, each entry's parts, the digest of the page sums
    2 MiB on  parts, aligned to a page, or to a cache line if small

Pages are mapped privately and never written: all processes that map a file share its memory. Weights are packed into
the mapped pages of the new file, so that storing them takes no copy.
"""

import contextlib
import functools
import hashlib
import json
import logging
import mmap
import os
import stat
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.dataclass import dataclass
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
HEADER_BYTES = 2 * 2**20
"""A huge page, so that the parts, too, begin at one."""
_CHUNK = 2**18
"""Bytes read at a time."""
_WEIGHT = 6364136223846793005
"""Base of the weights in a page's sum: odd, so that each bit of each word changes the sum."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A packed weight."""

    form: str
    """The format of its parts, which the packing code defines."""
    parts: "tuple[Bytes, ...]"


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
            # Of the open file, not of the path, which may lead to another by now.
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or os.fstat(file.fileno()).st_uid != os.geteuid():
                raise DamagedError("is not a file of this user")
            header = read_header(file.read(HEADER_BYTES), key)
            # private, so that torch takes it; it is never written
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            ask_for_huge_pages(pages)  # pages not in memory yet are then read as huge pages
            self._bytes: Bytes = np.frombuffer(pages, np.uint8)
        if len(self._bytes) != header["bytes"]:
            raise DamagedError(f"has {len(self._bytes)} bytes, not {header['bytes']}")
        self._sums = str(header["sums"])
        self.entries: Mapping[str, Entry] = {
            name: Entry(form, tuple(self._bytes[first : first + count] for first, count in parts))
            for name, (form, parts) in header["entries"].items()
        }
        self._check: threading.Thread | None = None
        self._is_whole = False

    def get(self, name: str) -> Entry | None:
        """The entry of a weight, if there is one."""
        return self.entries.get(name)

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
        chunks = (self._bytes[at : at + _CHUNK] for at in range(HEADER_BYTES, len(self._bytes), _CHUNK))
        self._is_whole = _digest(map(_page_sums, chunks)) == self._sums


def read_header(start: bytes, key: str) -> dict[str, Any]:
    if not start.startswith(_MAGIC):
        raise DamagedError("does not begin as such a file does")
    digest, text = start[len(_MAGIC) : _START_BYTES], start[_START_BYTES:]
    if hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() != digest:
        raise DamagedError("has a header that is damaged or cut short")
    header: dict[str, Any] = json.loads(text[: text.rfind(b"}") + 1])  # to parse the spaces after it would take 6 ms
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
            os.posix_fallocate(self._file, 0, HEADER_BYTES + size)
            self.arena = FileArena(self._file, HEADER_BYTES, size)
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
        # Last, so that a file under its own name is complete.
        self._temporary.replace(self._path)


def _file_sums(file: int, size: int) -> str:
    """The digest of the sums of all pages of weights."""
    import numpy as np

    sums = np.empty((size - HEADER_BYTES) // _PAGE, np.uint64)

    def sum_every_second_chunk(begin: int) -> None:
        memory = np.empty(_CHUNK, np.uint8)  # of all chunks: new memory would cost more than what is copied to it
        for at in range(begin, size - HEADER_BYTES, 2 * _CHUNK):
            count = os.preadv(file, [memory[: size - HEADER_BYTES - at].data], HEADER_BYTES + at)
            sums[at // _PAGE :][: count // _PAGE] = _page_sums(memory[:count])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sum_every_second_chunk, (0, _CHUNK)))
    return _digest([sums])


def _write_header(file: int, header: dict[str, Any]) -> None:
    import numpy as np

    text = json.dumps(header).encode()
    if len(text) > HEADER_BYTES - _START_BYTES:
        raise OSError(f"the model has too many weights: their list takes {len(text)} bytes")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    offset = _START_BYTES
    while offset < HEADER_BYTES:
        digest.update(text)
        _write_all(file, offset, np.frombuffer(text, np.uint8))
        offset += len(text)
        text = b" " * min(_PAGE, HEADER_BYTES - offset)
    # The magic last: a header that is cut short has none.
    _write_all(file, 0, np.frombuffer(_MAGIC + digest.digest(), np.uint8))


def _write_all(file: int, offset: int, part: "Bytes") -> None:
    view = part.data
    while view.nbytes:
        written = os.pwrite(file, view, offset)
        offset, view = offset + written, view[written:]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
