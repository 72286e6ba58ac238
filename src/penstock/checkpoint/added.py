"""Models, names and adapters that clients added to a running server, for the next one at its address.

    ~/.local/share/penstock/models/servers/port-11434.json      below $XDG_DATA_HOME
    {"models": ["org/repo"], "names": {"chat": "org/repo"}, "adapters": {"sql": {"model": "org/repo", "path": ...}},
     "deleted": []}

A change is made to the file's content of now, under a lock, and replaces the file at once: servers of one file, and
commands, keep each other's changes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, field, replace
from functools import partial
from pathlib import Path

from penstock.checkpoint.created import LATEST, remove_adapter, remove_created, remove_other_adapters
from penstock.checkpoint.data_folder import data_folder, locked, replace_synced, shared, write_synced
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError

_MAX_BYTES = 64 * 2**20
_HUBS = ("", "hf.co/", "huggingface.co/")
"""How names of the hub's models begin."""


@dataclass(frozen=True, slots=True)
class AddedAdapter:
    """An adapter that was added."""

    model: str
    """The own name of its model."""
    path: str
    """Its folder or file."""


@dataclass(frozen=True, slots=True)
class Added:
    """Models, names and adapters that were added; each name has one meaning."""

    models: tuple[str, ...] = ()
    """Names by which their files are found; each is the model's own name, too, unless it was deleted."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Own names of models by other names of theirs."""
    adapters: Mapping[str, AddedAdapter] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    """Own names of `models` that have other names alone."""

    def with_model(self, name: str) -> "Added":
        """With a model, which keeps the names and adapters of the one that it replaces."""
        other = self.without_name(name)
        models = other.models if name in other.models else (*other.models, name)
        return replace(other, models=models, deleted=_without(other.deleted, name))

    def without_model(self, name: str) -> "Added":
        """Without a model, its other names and its adapters."""
        return Added(
            _without(self.models, name),
            {other: model for other, model in self.names.items() if model != name},
            {other: adapter for other, adapter in self.adapters.items() if adapter.model != name},
            _without(self.deleted, name),
        )

    def without_own_name(self, name: str) -> "Added":
        """Without the own name of a model, which stays if it has others."""
        if not self.names_of(name):
            return self.without_model(name)
        return replace(self, deleted=(*self.deleted, name)) if name in {*self.models} - {*self.deleted} else self

    def with_name(self, name: str, model: str) -> "Added":
        """With one more name of a model, or with its own again."""
        other = self.without_name(name)
        if name == model:
            return replace(other, deleted=_without(other.deleted, name))
        return replace(other, names={**other.names, name: model})

    def with_adapter(self, name: str, adapter: AddedAdapter) -> "Added":
        """With an adapter."""
        other = self.without_name(name)
        return replace(other, adapters={**other.adapters, name: adapter})

    def without_name(self, name: str) -> "Added":
        """Without a name that was added, or an adapter; a model goes with its last name."""
        names = {other: model for other, model in self.names.items() if other != name}
        changed = replace(self, names=names, adapters={key: one for key, one in self.adapters.items() if key != name})
        model = self.names.get(name)
        is_last = model in self.deleted and model not in names.values()
        return changed.without_model(model) if model is not None and is_last else changed

    def names_of(self, model: str) -> list[str]:
        """Other names of the model of an own name."""
        return [name for name, own in self.names.items() if own == model]

    def adapters_of(self, model: str) -> dict[str, str]:
        """Paths of a model's adapters, by name."""
        return {name: adapter.path for name, adapter in self.adapters.items() if adapter.model == model}


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(other for other in names if other != name)


class AddedFile:
    """The file of what was added to a server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Added:
        """Its content; nothing if there is no file.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        try:
            with self.path.open("rb") as opened:
                read = json.loads(opened.read(_MAX_BYTES))
            models, names, adapters = read["models"], read["names"], read["adapters"]
            deleted = read.get("deleted", ())  # older versions have none
            if not all(isinstance(name, str) for name in (*models, *names, *names.values(), *adapters, *deleted)):
                raise TypeError("names are texts")
            return Added(
                tuple(models),
                dict(names),
                {name: AddedAdapter(str(one["model"]), str(one["path"])) for name, one in adapters.items()},
                tuple(deleted),
            )
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            # Nor is it in a folder that this user may not enter, as the home of another.
            if isinstance(error, OSError) and not os.path.exists(self.path):
                return Added()
            raise CheckpointError(
                f"{self.path}, the list of added models, cannot be read ({type(error).__name__}: {error}): mend or "
                "delete it"
            ) from error

    def change(self, change: Callable[[Added], Added]) -> None:
        """Change its content; it is on disk afterwards.

        Raises:
            CheckpointError: it cannot be read or written.
        """
        try:
            with locked(self.path.with_name(f"{self.path.name}.lock")):
                old = self.read()
                if (new := change(old)) != old:
                    draft = self.path.with_name(f"{self.path.name}.new")
                    write_synced(draft, json.dumps(asdict(new), indent=2) + "\n")  # ASCII: a path may be no Unicode
                    replace_synced(draft, self.path)
        except OSError as error:
            raise CheckpointError(f"the list of added models cannot be written to {self.path}: {error}") from error


def list_of(file: AddedFile | None) -> Path:
    """The path that marks a server's uploaded adapters as its own: that of its list, or one for all servers without."""
    return _folder() / "unlisted" if file is None else file.path


@contextmanager
def held_by_server(file: AddedFile | None) -> Iterator[None]:
    """Context of a running server of a list. The first of several deletes uploaded adapters that are not in the list:
    servers that were killed leave them.
    """
    path = list_of(file)

    def clean() -> None:
        with suppress(CheckpointError):
            listed = Added() if file is None else file.read()
            remove_other_adapters(path, {adapter.path for adapter in listed.adapters.values()})

    with ExitStack() as stack:
        with suppress(OSError):  # without a writable folder nothing is uploaded
            stack.enter_context(shared(path.with_name(f"{path.name}.servers"), clean))
        yield


def file_of_address(port: int, uds: str | None = None) -> AddedFile | None:
    """The file of the server of a port or Unix socket; None: any free port is another one each time."""
    if uds is not None:
        name = f"socket-{hashlib.sha256(str(Path(uds).expanduser().absolute()).encode()).hexdigest()[:16]}"
    elif port:
        name = f"port-{port}"
    else:
        return None
    return AddedFile(_folder() / f"{name}.json")


def added_files() -> list[AddedFile]:
    """The files of all addresses."""
    return [AddedFile(path) for path in sorted(_folder().glob("*.json"))] if os.path.isdir(_folder()) else []


def forget(names: Iterable[str]) -> None:
    """Remove models that were deleted, by their names without that of the hub, from the files of all addresses."""
    deleted = {f"{hub}{name}" for name in names for hub in _HUBS}
    for file, added in _readable_files():
        for name in deleted.intersection(added.models):
            file.change(partial(Added.without_model, name=name))


def other_names(model: str) -> dict[str, str]:
    """Other names of the model of an own name, in the files of all addresses, and each file's address."""
    return {name: file.path.stem for file, added in _readable_files() for name in added.names_of(model)}


def delete_created(given: str) -> tuple[int, dict[str, str]]:
    """Delete a created model or, while servers have other names of it, its own name alone. Returns the bytes that were
    freed, and the other names that its files stay for, as `other_names` does.

    Raises:
        CheckpointError: it has other names alone, or cannot be deleted.
    """
    name = given.removesuffix(LATEST)
    others = other_names(name)
    if not others:
        freed = remove_created(given)
        forget([name])
        return freed or 0, {}
    if not _forget_own_name(name):
        raise CheckpointError(
            f"the files of {name} stay for its other names, which are to be deleted first: {with_servers(others)}"
        )
    return 0, others


def with_servers(names: Mapping[str, str]) -> str:
    """Names and the addresses that have them, as `other_names` returns them, in words."""
    return ", ".join(f"{name} in the server of {server}" for name, server in names.items())


def _forget_own_name(model: str) -> bool:
    """Remove the own name of a model from the files of all addresses; where it has others, it stays. Returns whether
    there was one.
    """
    found = [file for file, added in _readable_files() if model in {*added.models} - {*added.deleted}]
    for file in found:
        file.change(partial(Added.without_own_name, name=model))
    return bool(found)


def forget_name(name: str) -> list[str] | None:
    """Remove a name or adapter that was added from the files of all addresses, with the uploaded files of the adapter.
    Returns the own names of models whose last name this was; None if there was no such name or adapter.
    """
    found = [(file, added) for file, added in _readable_files() if name in {**added.names, **added.adapters}]
    for file, added in found:
        file.change(partial(Added.without_name, name=name))
        adapter = added.adapters.get(name)
        if adapter is not None and adapter.path not in (one.path for one in file.read().adapters.values()):
            remove_adapter(Path(adapter.path))
    left = {model for _, added in _readable_files() for model in (*added.models, *added.names.values())}
    named = {added.names[name] for _, added in found if added.names.get(name) in added.deleted}
    return sorted(named - left) if found else None


def _readable_files() -> list[tuple[AddedFile, Added]]:
    """The files of all addresses without damaged ones, which are reported when their server starts."""
    files = []
    for file in added_files():
        with suppress(CheckpointError):
            files.append((file, file.read()))
    return files


def _folder() -> Path:
    return data_folder() / "servers"
