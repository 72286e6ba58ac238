"""Downloads a model from the hub in a process of its own, which its server may end: the next one goes on.

    python -m penstock.checkpoint.hub_pull ORG/REPO:Q4_K_M

Each line that it prints is JSON: `digest`, `total` and `completed` bytes of a large file; a `status`; and at the end
the model's `path`, or an `error`.
"""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path

from penstock.checkpoint.checkpoint import download_model, open_checkpoint, weights_size
from penstock.checkpoint.hub_cache import check_files, find_cached
from penstock.checkpoint.hub_download import download_large_files
from penstock.errors import CheckpointError, ConfigError
from penstock.system.parent import die_with_parent

INTERVAL = 0.3
"""Seconds between lines about a file that grows."""


class _Progress:
    """Prints the current file's progress."""

    def __init__(self) -> None:
        self._file: tuple[str, int, Path] | None = None
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def on_file(self, digest: str, size: int, part: Path) -> None:
        """Begin a file; the one before it is whole."""
        with self._lock:
            self._tell_whole()
            self._file = digest, size, part
            self._tell_part()

    def end(self) -> None:
        """Stop; all files are whole."""
        self._is_done.set()
        self._thread.join()
        self._tell_whole()

    def _run(self) -> None:
        while not self._is_done.wait(INTERVAL):
            with self._lock:
                self._tell_part()

    def _tell_part(self) -> None:
        if self._file is not None:
            digest, size, part = self._file
            with contextlib.suppress(FileNotFoundError):
                tell(digest=f"sha256:{digest}", total=size, completed=part.stat().st_size)

    def _tell_whole(self) -> None:
        if self._file is not None:
            digest, size, _ = self._file
            tell(digest=f"sha256:{digest}", total=size, completed=size)


def tell(**line: str | int) -> None:
    """Print a line."""
    print(json.dumps(line), flush=True)


def main(model: str) -> None:
    try:
        path = _pull(model)
    except ConfigError as error:
        tell(error=str(error))
    else:
        tell(path=str(path))


def _pull(model: str) -> Path:
    progress = _Progress()
    try:
        download_large_files(model, None, progress.on_file)
    except CheckpointError:
        raise
    except Exception as error:  # no network, or a bad id: what follows finds the model in the cache, or says so
        print(f"the hub gives no list of the files of {model}: {type(error).__name__}", file=sys.stderr, flush=True)
    path = download_model(model)
    progress.end()
    tell(status="verifying sha256 digest")
    if (cached := find_cached(model)) is not None:
        check_files(cached.files)
    open_checkpoint(str(path))
    weights_size(path)  # raises if a part is missing, as without a network after a download that was broken off
    return path


if __name__ == "__main__":
    die_with_parent()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    main(sys.argv[1])
