"""Downloads the large files of a hub repository to the hub's cache, so that an interrupted download is resumed.

`huggingface_hub` resumes after a broken connection, but begins a file anew once its process has ended. Here a file
grows under a name of its own beside the cache's blobs, is compared with its checksum and becomes the blob, which
`snapshot_download` then finds. Files on Xet storage are left to `huggingface_hub`, where `hf_xet` is installed.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.checkpoint.checkpoint import HUB_COPIES, HUB_FILES, HUB_ID, HUB_SECONDS
from penstock.checkpoint.gguf.file import choose_gguf
from penstock.checkpoint.gguf.mmproj import wanted_files
from penstock.checkpoint.hub_cache import checksum
from penstock.errors import CheckpointError

LARGE = 16 * 2**20
"""Minimum bytes of a file whose download is resumed rather than repeated."""


def download_large_files(
    model: str, revision: str | None, on_file: Callable[[str, int, Path], None] = lambda digest, size, part: None
) -> None:
    """Download the large files of a model that are not in the cache yet.

    Args:
        model: a hub id, perhaps with the choice of a GGUF file.
        on_file: called for each file before its download, with its SHA-256, its size, and the path under which it
            grows.

    Raises:
        CheckpointError: a file differs from its checksum, or no GGUF file or several match.
        Exception: whatever `huggingface_hub` raises, as without a network.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils._runtime import is_xet_available

    found = HUB_ID.fullmatch(model)
    if found is None:
        return
    repository = found["repository"]
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    for name, digest, size in _large_files(repository, found["choice"], revision):
        url = hf_hub_url(repository, name, revision=revision)
        on_file(digest, size, _part(blobs / digest))
        if (blobs / digest).exists():
            continue
        if getattr(get_hf_file_metadata(url), "xet_file_data", None) is not None and is_xet_available():
            continue
        _download(url, blobs / digest, size, name)


def _large_files(repository: str, choice: str | None, revision: str | None) -> Iterator[tuple[str, str, int]]:
    """Name, SHA-256 and size of each large file of a model."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils._paths import filter_repo_objects

    info = HfApi().model_info(repository, revision=revision, timeout=HUB_SECONDS, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or ()}
    names = list(filter_repo_objects(files, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES))
    if choice is not None or not any(name.endswith(".safetensors") for name in names):
        models = [name for name in files if name.endswith(".gguf")]
        names = wanted_files(models, choose_gguf(models, choice, f"the hub repository {repository}"))
    for name in names:
        lfs = files[name].lfs
        if lfs is not None and lfs.size >= LARGE:
            yield name, lfs.sha256, lfs.size


def _download(url: str, blob: Path, size: int, name: str) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    blob.parent.mkdir(parents=True, exist_ok=True)
    part = _part(blob)
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may download it, too
        if blob.exists() or not part.exists():
            return
        begun = file.seek(0, os.SEEK_END)
        http_get(url, file, resume_size=begun, headers=build_hf_headers(), expected_size=size, displayed_filename=name)
        file.flush()
        if checksum(part, blob.name) != blob.name:
            part.unlink()
            raise CheckpointError(f"{name}: the content differs from the hub's checksum; deleted: pull the model again")
        part.replace(blob)


def _part(blob: Path) -> Path:
    """Where a file grows until it is whole."""
    return blob.with_name(f"{blob.name}.part")
