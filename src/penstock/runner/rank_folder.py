"""The folder for the rendezvous of an engine's ranks by torch.distributed. A later start removes a killed engine's."""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "penstock-ranks-"
_NAME = re.compile(rf"{_PREFIX}(\d+)-.+")


class RankFolder:
    """A private folder, named after its process and locked while that lives."""

    def __init__(self) -> None:
        remove_abandoned()
        self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned() -> None:
    """Remove this user's folders of dead processes: dead here and, by their lock, in every other container, too."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        found = _NAME.fullmatch(folder.name)
        if found is not None and not Path("/proc", found[1]).exists():
            with contextlib.suppress(OSError):  # another user's, locked, or removed meanwhile
                _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
