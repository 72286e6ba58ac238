"""Cache of packed weights on disk: a folder of this user alone, with files as in `packed_file.py`. No torch.

    KEY.packed   one model
    KEY.lock     locked while it is packed
    KEY.tmp      being written
    KEY.damaged  a damaged file

A key names content, recipe, dtype and code (`models/loading/packed_key.py`), so weights never change; a file with more
of them may take a file's place (`models/loading/packed_loading.py`). A damaged file (header, size or any page sum) is
renamed to KEY.damaged and rebuilt. When the folder would exceed its limit, the least recently used files are deleted.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.dataclass import dataclass
from penstock.system.packed_file import HEADER_BYTES, DamagedError, PackedFile, PackedFileWriter, read_header

log = logging.getLogger(__name__)

_LOCK_SECONDS = 300.0
"""Seconds to wait for another process that packs the same model, before packing without storing the result."""
_MAX_BYTES = 64 * 2**30
_FREE_SPACE_DIVISOR = 4
"""The folder may use 1 / `_FREE_SPACE_DIVISOR` of the disk's free space plus its own size, and at most `_MAX_BYTES`."""


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
            # The time of use, by which `_make_room` chooses: `atime` is not kept on many systems.
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

    def begin(self, key: str, size: int, about: str = "") -> PackedFileWriter | None:
        """A writer for a model of about `size` bytes of packed weights; None if it exceeds the folder's limit.

        The key must be `locked`. `about` describes the model, for `files`.
        """
        try:
            if not self._make_room(HEADER_BYTES + size, key):
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
        found = [CachedFile(path, status.st_size, status.st_mtime, _about(path)) for path, status in self._found()]
        return sorted(found, key=lambda file: -file.used)

    def _found(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.iterdir() if self._folder.exists() else ():
            if re.fullmatch(r"[0-9a-f]+\.(packed|damaged|tmp)", path.name):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    yield path, path.lstat()

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

    def usage(self) -> tuple[int, int]:
        """Total bytes of its files, and the most that they may take, from the current free disk space.

        Raises:
            OSError: the folder is missing.
        """
        held = sum(status.st_size for path, status in self._found() if path.suffix != ".tmp")
        return held, self._bound(held)

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
        # Before anything is deleted: a model that never fits must not cost the others their files.
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
            return str(read_header(opened.read(HEADER_BYTES), file.stem).get("about") or "a model")
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
