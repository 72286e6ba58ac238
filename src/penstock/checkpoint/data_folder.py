"""The user's folder of models that clients made, and of what servers were given while they served.

    ~/.local/share/penstock/models/     below $XDG_DATA_HOME
        blobs/, created/, adapters/     `created.py`
        servers/                        `added.py`

Any number of processes change it: each step is atomic, and steps that belong together are made under a lock, which ends
with its process.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def data_folder() -> Path:
    """The folder, without links."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(os.path.realpath(data), "penstock", "models")


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Context that one thread of one process is in at a time; made by an empty file, which stays.

    Raises:
        OSError: it cannot be written.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def shared(lock: Path, when_alone: Callable[[], None]) -> Iterator[None]:
    """Context that any number of processes are in; made by an empty file, which stays.

    Args:
        when_alone: called first, if no other process is in it; none enters meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "ab") as opened:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            when_alone()
        fcntl.flock(opened, fcntl.LOCK_SH)
        yield


def write_synced(file: Path, text: str) -> None:
    """Write a file that is on disk afterwards.

    Raises:
        OSError: it cannot be written.
    """
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def replace_synced(old: Path, new: Path) -> None:
    """Rename a file or folder; the new name is on disk afterwards.

    Raises:
        OSError: it cannot be renamed.
    """
    old.replace(new)
    descriptor = os.open(new.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
