"""Models created by Ollama's `/api/create`: files of a model, with settings of their own. No network.

    ~/.local/share/penstock/models/     below $XDG_DATA_HOME
        blobs/sha256-DIGEST             uploaded files
        created/NAME/                   a model's folder: links to its files, and its recipe, penstock.json
        adapters/NAME.xxxxxxxx/         an adapter's folder: links to its files, and the list of the server that has it

A process that is killed leaves folders whose names begin with a point: `.new-` before it has a name, `.old-NAME` while
another takes its place, `.deleted-NAME`. The next one to look completes the change, or undoes it.

A recipe's settings apply wherever the model is loaded by its name: they are defaults of sampling, a chat template, and
messages that precede every conversation. A file of this name elsewhere is not read.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from penstock.checkpoint.data_folder import data_folder, locked, replace_synced, write_synced
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

RECIPE = "penstock.json"
OWNER = "server"
"""File in an adapter's folder: the path of the list that its server keeps (`added.py`)."""
MAX_CREATED = 1000
"""Maximum created models."""
_NAME = re.compile(r"\w[\w.:/@+-]{0,79}", re.ASCII)
_MAX_BYTES = 8 * 2**20
_OLD, _DELETED = ".old-", ".deleted-"
LATEST = ":latest"
"""The tag that Ollama's clients add to a name."""
_UNUSED_SECONDS = 24 * 3600.0
"""Age from which an uploaded file that no model uses is deleted."""
_GENERATION = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_new_tokens",
    "stop": "stop_strings",
}
"""Parameters of a recipe, which have Ollama's names, and the keys of `generation_config.json`."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a created model."""

    base: str = ""
    """The model that it was made from; empty: uploaded files."""
    template: str | None = None
    """Jinja source of the chat template; None: that of the files."""
    system: str = ""
    """System message of conversations that have none."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of sampling, and `num_ctx`, by Ollama's names."""
    messages: Sequence[Mapping[str, str]] = ()
    """Messages (role and content) that precede every conversation, after its system message."""
    license: Sequence[str] = ()

    @property
    def num_ctx(self) -> int | None:
        """Size of the context; None: the model's own."""
        return self.parameters.get("num_ctx")

    def generation(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The content of `generation_config.json` with the recipe's parameters."""
        made = {_GENERATION[name]: value for name, value in self.parameters.items() if name in _GENERATION}
        kept = {key: value for key, value in given.items() if key != "do_sample" or "temperature" not in made}
        return kept | made

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A conversation with the recipe's messages."""
        has_system = bool(messages) and messages[0].get("role") == "system"
        own = [{"role": "system", "content": self.system}] if self.system and not has_system else []
        return [*own, *messages[:has_system], *self.messages, *messages[has_system:]]


@dataclass(frozen=True, slots=True)
class CreatedModel:
    """A created model."""

    name: str
    path: Path
    """Its folder."""
    num_bytes: int
    """Total size of its files; several models may share one."""
    modified: float
    """When it was created, in seconds since 1970."""


def check_created_name(name: str) -> None:
    """
    Raises:
        CheckpointError: no model can be created by this name.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"a created model's name must be 1 to 80 letters, digits and ._-+@:/, a letter or digit first, not "
            f"{shown(name)}"
        )


def _changing() -> AbstractContextManager[None]:
    return locked(data_folder() / ".lock")


def blob_path(digest: str) -> Path:
    """Where the file with a SHA-256 of 64 hexadecimal digits is, or would be."""
    return data_folder() / "blobs" / f"sha256-{digest}"


def find_created(name: str) -> Path | None:
    """The folder of a created model; None if there is none of this name."""
    folders = [_folder(alias) for alias in (name, name.removesuffix(LATEST)) if _NAME.fullmatch(alias)]
    found = next(filter(os.path.isdir, folders), None)
    if found is None and folders and _recovered():
        found = next(filter(os.path.isdir, folders), None)
    return found


def _recovered() -> bool:
    """Complete or undo changes whose process was killed; whether there were any. Waits for those under way."""
    if not _unfinished():
        return False
    with suppress(OSError), _changing():  # a folder that only others may write stays as it is
        _recover()
    return True


def _recover() -> None:
    for remains in _unfinished():
        final = remains.with_name(remains.name.removeprefix(_OLD))
        if remains.name.startswith(_OLD) and not final.exists() and (remains / RECIPE).exists():
            remains.rename(final)
        else:
            shutil.rmtree(remains)


def _unfinished() -> list[Path]:
    root = _created()
    if not os.path.isdir(root):  # nor may it be looked for: pathlib raises in the home of another user
        return []
    return [folder for kind in (_OLD, _DELETED) for folder in root.glob(f"{kind}*")]


def created_models() -> list[CreatedModel]:
    """All created models, by name."""
    return [_described(folder) for folder in _folders()]


def _described(folder: Path) -> CreatedModel:
    sizes = [file.stat().st_size for file in folder.iterdir() if file.is_file() and file.name != RECIPE]
    return CreatedModel(unquote(folder.name), folder, sum(sizes), folder.stat().st_mtime)


def recipe_of(path: Path) -> Recipe | None:
    """The recipe of the model in a folder or GGUF file; None if it was not created.

    Raises:
        CheckpointError: the recipe is damaged.
    """
    folder = _created_folder(path)
    if folder is None:
        return None
    file = folder / RECIPE
    try:
        with file.open("rb") as opened:
            read = json.loads(opened.read(_MAX_BYTES))
        return Recipe(**{option.name: read[option.name] for option in fields(Recipe)})
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error}): create the model again") from error


def version_of(path: Path) -> str:
    """A text that changes when another model takes the place of the created one in a folder or GGUF file; of other
    models it is empty.
    """
    folder = _created_folder(path)
    try:
        return "" if folder is None else f" {folder.stat().st_mtime_ns}"
    except FileNotFoundError:
        return ""


def _created_folder(path: Path) -> Path | None:
    folder = path if path.suffix != ".gguf" and path.is_dir() else path.parent
    return folder if folder.parent.name == "created" and folder.parent == _created() else None


def write_created(files: Mapping[str, Path], recipe: Recipe) -> Path:
    """Write the folder of a new model: `name_created` gives it a name, or `discard_created` deletes it.

    Args:
        files: the files that its names lead to.

    Raises:
        CheckpointError: there are too many models, the recipe is too long, or it cannot be written.
    """
    written = json.dumps(asdict(recipe), ensure_ascii=False, indent=2)
    if len(written.encode()) > _MAX_BYTES:
        raise CheckpointError(f"the model's settings are longer than {_MAX_BYTES} bytes: shorten messages or template")
    if len(_folders()) >= MAX_CREATED:
        raise CheckpointError(f"there are {MAX_CREATED} created models already: delete some")
    folder = _linked(_created(), files)
    try:
        write_synced(folder / RECIPE, written + "\n")
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {folder}: {error}") from error
    return folder


def _linked(root: Path, files: Mapping[str, Path]) -> Path:
    """Link existing files into a new folder, which keeps their uploads from being deleted.

    Raises:
        CheckpointError: one is gone, or it cannot be written.
    """
    blobs = data_folder() / "blobs"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _changing():
            for name, file in files.items():
                if not file.exists():
                    raise CheckpointError(f"{name} was deleted meanwhile ({file})")
            folder = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
            for name, file in files.items():
                (folder / name).symlink_to(os.path.relpath(file, folder) if file.parent == blobs else file)
    except OSError as error:
        raise CheckpointError(f"nothing can be written to {root}: {error}") from error
    return folder


def name_created(folder: Path, name: str) -> Path:
    """Name a folder of `write_created`, whose model replaces any of this name. Returns its path.

    Raises:
        CheckpointError: it cannot be written.
    """
    check_created_name(name)
    final = _folder(name)
    old = final.with_name(_OLD + final.name)
    try:
        with _changing():
            _recover()
            if final.exists():
                final.rename(old)
            replace_synced(folder, final)
            if old.exists():
                _delete(old)
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {final}: {error}") from error
    return final


def copy_created(folder: Path, name: str) -> None:
    """Create a model equal to that in a folder. Raises as `name_created`."""
    recipe = recipe_of(folder)
    assert recipe is not None, "a created model's folder"
    check_created_name(name)
    made = write_created(created_files(folder), recipe)
    try:
        name_created(made, name)
    finally:
        discard_created(made)


def created_files(folder: Path) -> dict[str, Path]:
    """The files of a created model by name: those that its links lead to."""
    try:
        links = [file for file in folder.iterdir() if file.is_symlink()]
    except (NotADirectoryError, FileNotFoundError):  # a file of another program; deleted meanwhile
        return {}
    return {link.name: Path(os.path.normpath(folder / os.readlink(link))) for link in links}


def discard_created(folder: Path) -> None:
    """Delete a folder of `write_created` or `write_adapter`, unless it has a name; uploaded files stay for another
    try.
    """
    shutil.rmtree(folder, ignore_errors=True)


def remove_created(name: str) -> int | None:
    """Delete a created model, and those of its uploaded files that no other one uses. Returns the bytes of these; None
    if there is no such model.

    Raises:
        CheckpointError: it cannot be deleted.
    """
    folder = find_created(name)
    if folder is None:
        return None
    try:
        with _changing():
            return _delete(folder) if folder.exists() else None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be deleted: {error}") from error


def _delete(folder: Path) -> int:
    """Delete a folder, which loses its name first, and uploads that no other one uses; the lock is held."""
    blobs, remains = _blobs_of(folder), folder.with_name(_DELETED + folder.name)
    shutil.rmtree(remains, ignore_errors=True)
    folder.rename(remains)
    shutil.rmtree(remains)
    freed = 0
    for blob in blobs - _used_blobs():
        freed += blob.stat().st_size if blob.exists() else 0
        blob.unlink(missing_ok=True)
    return freed


def write_adapter(files: Mapping[str, Path], owner: Path) -> Path:
    """Write the folder of a new adapter: `name_adapter` gives it a name, or `discard_created` deletes it. Raises as
    `write_created`.

    Args:
        owner: the list of added models of the server that will have it.
    """
    folder = _linked(_adapters(), files)
    try:
        (folder / OWNER).write_bytes(os.fsencode(owner))
    except OSError as error:
        raise CheckpointError(f"the adapter cannot be written to {folder}: {error}") from error
    return folder


def name_adapter(folder: Path, name: str) -> Path:
    """Name a folder of `write_adapter`, which stays apart from others of this name: other servers may use those.
    Returns its path.

    Raises:
        CheckpointError: it cannot be written, or the name is none.
    """
    check_created_name(name)
    final = folder.with_name(f"{quote(name, safe='')}.{folder.name.removeprefix('.new-')}")
    try:
        replace_synced(folder, final)
    except OSError as error:
        raise CheckpointError(f"the adapter cannot be written to {final}: {error}") from error
    return final


def is_stored_adapter(folder: Path) -> bool:
    """Whether this is the folder of an uploaded adapter."""
    return folder.parent == _adapters()


def remove_adapter(folder: Path) -> None:
    """Delete the folder of an uploaded adapter, and those of its files that nothing else uses; others stay."""
    if is_stored_adapter(folder):
        with suppress(OSError), _changing():
            _delete(folder)


def remove_other_adapters(owner: Path, listed: Collection[str]) -> None:
    """Delete the folders of a server's uploaded adapters that its list does not have; no such server may be running.

    Args:
        owner: see `write_adapter`.
        listed: the paths in its list.
    """
    named = [folder for folder in _adapters().glob("[!.]*") if str(folder) not in listed]
    for folder in named:
        with suppress(OSError):
            if (folder / OWNER).read_bytes() == os.fsencode(owner):
                remove_adapter(folder)


def _adapters() -> Path:
    return data_folder() / "adapters"


def delete_unused_blobs() -> None:
    """Delete uploaded files that are a day old and part of no model, and remains of uploads and of creations."""
    _recovered()
    with suppress(OSError), _changing():
        for remains in [*_created().glob(".new-*"), *_adapters().glob(".new-*"), *_adapters().glob(f"{_DELETED}*")]:
            if _is_abandoned(remains):
                shutil.rmtree(remains, ignore_errors=True)
        used = _used_blobs()
        for blob in (data_folder() / "blobs").glob("sha256-*"):
            if blob not in used and _is_abandoned(blob):
                blob.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _UNUSED_SECONDS
    except FileNotFoundError:  # its upload has ended
        return False


def _used_blobs() -> set[Path]:
    roots = [root for root in (_created(), _adapters()) if root.is_dir()]
    return {blob for root in roots for folder in root.iterdir() for blob in _blobs_of(folder)}


def _blobs_of(folder: Path) -> set[Path]:
    """The uploaded files that a folder links to."""
    blobs = data_folder() / "blobs"
    return {target for target in created_files(folder).values() if target.parent == blobs}


def _folders() -> list[Path]:
    root = _created()
    _recovered()
    found = root.iterdir() if os.path.isdir(root) else ()
    return sorted(folder for folder in found if not folder.name.startswith(".") and folder.is_dir())


def _folder(name: str) -> Path:
    return _created() / quote(name, safe="")


def _created() -> Path:
    return data_folder() / "created"
