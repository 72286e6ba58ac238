"""Models in the hub's cache on this machine: their list, their checksums, and their removal. No network.

    models--ORG--REPO/snapshots/COMMIT/FILE ──link──> blobs/ETAG

The etag of a file is the SHA-256 of its content or, of a small file, git's SHA-1; a cached blob has it as its name.
"""

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.checkpoint.gguf.file import choose_gguf, is_model_name, model_name, parts_of
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError

if TYPE_CHECKING:  # importing it takes a quarter of a second
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*)$", re.IGNORECASE)
_READ_BYTES = 2**22
CONNECT_SECONDS = 5.0
"""Maximum time to wait for a connection to the hub."""
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache."""

    name: str
    """The hub id, of a GGUF file with its quantization or file name: as `--model` takes it."""
    commit: str
    branches: tuple[str, ...]
    """Branches and tags that name the commit."""
    path: Path
    """The folder, or the GGUF file."""
    files: tuple[Path, ...]
    num_bytes: int
    used: float
    """When it was last read, in seconds since 1970."""


def cached_models() -> list[CachedModel]:
    """All models in the cache that have weights, by name."""
    found = [model for repository in _repositories() for model in _models_of(repository)]
    return sorted(found, key=lambda model: (model.name, model.commit))


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """The folder of a repository's revision (None: the main branch) in the cache, with the files that it has there.

    `snapshot_download` refuses a folder in which files are missing, such as those of other quantizations.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    root = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    name = revision or "main"
    ref = root / "refs" / name
    folder = root / "snapshots" / (ref.read_text().strip() if ref.is_file() else name)
    return folder if folder.is_dir() else None


def hub_answers() -> bool:
    """Whether the hub, or the proxy before it, takes a connection.

    Without a network `huggingface_hub` tries again for most of a minute before it looks into its cache.
    """
    from urllib.request import getproxies, proxy_bypass  # imported when used: it takes a while

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    hub = urlsplit(constants.ENDPOINT)
    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme)
    address = hub if proxy is None else urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def find_cached(name: str, revision: str | None = None) -> CachedModel | None:
    """The cached model of a hub id, perhaps with the choice of a GGUF file; None if there is none.

    Args:
        revision: branch, tag or commit; None: the main branch or, without it, any.

    Raises:
        CheckpointError: there are several.
    """
    repository, _, choice = name.partition(":")
    models = [model for model in cached_models() if model.name.partition(":")[0] == repository]
    if revision is not None:
        models = [model for model in models if revision in (model.commit, *model.branches)]
    elif any("main" in model.branches for model in models):
        models = [model for model in models if "main" in model.branches]
    if choice:
        models = [model for model in models if _is_chosen(model, choice)]
    if len(models) > 1:
        listed = ", ".join(f"{model.name} ({model.commit[:7]})" for model in models)
        raise CheckpointError(f"{name} names {len(models)} models in the cache: {listed}")
    return models[0] if models else None


def _is_chosen(model: CachedModel, choice: str) -> bool:
    try:
        return choose_gguf([model.path.name], choice, model.name) == model.path.name
    except CheckpointError:
        return False


def _repositories() -> "list[CachedRepoInfo]":
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [repository for repository in scan_cache_dir().repos if repository.repo_type == "model"]
    except CacheNotFound:
        return []


def _models_of(repository: "CachedRepoInfo") -> Iterator[CachedModel]:
    from penstock.checkpoint.gguf.mmproj import wanted_files  # imported when used: a start without the hub has no need

    for revision in repository.revisions:
        files = {str(file.file_path.relative_to(revision.snapshot_path)): file.file_path for file in revision.files}
        if "config.json" in files and any(name.endswith(".safetensors") for name in files):
            path = revision.snapshot_path
            yield _model(revision, repository.repo_id, path, list(files.values()))
            continue
        names = [name for name in files if name.endswith(".gguf")]
        for name in names:
            if name == min(parts_of(names, name)) and is_model_name(name):
                full = f"{repository.repo_id}:{_choice(names, name)}"
                yield _model(revision, full, files[name], [files[file] for file in wanted_files(names, name)])


def _choice(names: Sequence[str], name: str) -> str:
    """The shortest text that chooses a GGUF file among others: its quantization, or else its name."""
    found = _QUANTIZATION.search(model_name(Path(name)))
    try:
        return found[1] if found and choose_gguf(names, found[1], "") == name else name
    except CheckpointError:
        return name


def _model(revision: "CachedRevisionInfo", name: str, path: Path, files: list[Path]) -> CachedModel:
    held = [file for file in revision.files if file.file_path in files]
    return CachedModel(
        name,
        revision.commit_hash,
        tuple(sorted(revision.refs)),
        path,
        tuple(sorted(files)),
        sum(file.size_on_disk for file in held),
        max(file.blob_last_accessed for file in held),
    )


def check_files(files: Sequence[Path]) -> int:
    """Compare files of the cache with their checksums; damaged ones are deleted, so that they are downloaded again.

    Returns the number of compared files: those that are links to a blob named by its checksum.

    Raises:
        CheckpointError: some are damaged.
    """
    compared, damaged = 0, []
    for file in files:
        blob = Path(os.readlink(file)) if file.is_symlink() else file
        wanted = blob.name
        if not (_SHA256.fullmatch(wanted) or _GIT_SHA1.fullmatch(wanted)):
            continue
        compared += 1
        if checksum(file, wanted) != wanted:
            damaged.append(file)
    for file in damaged:
        file.resolve().unlink(missing_ok=True)
        (file.parent / os.readlink(file)).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(file.name for file in damaged)
        raise CheckpointError(f"{names}: the content differs from the hub's checksum; deleted: pull the model again")
    return compared


def checksum(file: Path, wanted: str) -> str:
    """The checksum of a file, of the same kind as `wanted`: SHA-256, or git's SHA-1."""
    if len(wanted) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {file.stat().st_size}\0".encode())  # as git hashes it
    with file.open("rb") as opened:
        while chunk := opened.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def remove_cached(model: CachedModel) -> None:
    """Delete a model's files but those of other models, such as an mmproj file; if there are none, the whole revision.

    Raises:
        CheckpointError: they cannot be deleted.
    """
    from huggingface_hub import scan_cache_dir

    repository = model.name.partition(":")[0]
    others = [
        other for other in cached_models() if other.name.partition(":")[0] == repository and other.path != model.path
    ]
    of_others = {file for other in others for file in other.files}
    shared = {file.resolve() for file in of_others}
    try:
        if not any(other.commit == model.commit for other in others):
            scan_cache_dir().delete_revisions(model.commit).execute()
            return
        for file in set(model.files) - of_others:
            if file.is_symlink() and file.resolve() not in shared:
                (file.parent / os.readlink(file)).unlink(missing_ok=True)
            file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{model.name} cannot be deleted: {error}") from None
