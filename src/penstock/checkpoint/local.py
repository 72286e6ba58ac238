"""Models on this machine by name, never by path: created ones, aliases, and those of the hub's cache. No network."""

from pathlib import Path

from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.checkpoint import HUB_ID, find_on_disk, open_checkpoint, weights_size
from penstock.checkpoint.created import LATEST, find_created
from penstock.checkpoint.hub_cache import find_cached
from penstock.errors import CheckpointError

_HUBS = ("hf.co/", "huggingface.co/")
"""How names of the hub's models begin in Ollama."""


def find_local(name: str) -> Path | None:
    """The model of a name; None if there is none.

    Raises:
        ConfigError: there are several, or the aliases cannot be read.
    """
    if (folder := find_created(name)) is not None:
        return folder
    name = name.removesuffix(LATEST)
    if (alias := read_aliases().get(name)) is not None:
        return find_on_disk(alias)
    cached = find_cached(without_hub(name))
    return None if cached is None else cached.path


def find_whole(name: str) -> str | None:
    """Path of the model of a name; None: it has to be downloaded, or the rest of it.

    Raises:
        ConfigError: it cannot be read.
    """
    if (found := find_local(name)) is None:
        return None
    try:
        checkpoint = open_checkpoint(str(found))
        weights_size(checkpoint.path)  # a GGUF file within a folder of a created model
    except (CheckpointError, OSError) as error:
        if find_created(name) is not None or as_hub_id(name) is None:
            raise CheckpointError(str(error)) from error
        return None
    return str(found)


def as_hub_id(name: str) -> str | None:
    """The id of a name or alias of the hub; None if it is none."""
    given = without_hub(read_aliases().get(name, name))
    return given if "/" in given and HUB_ID.fullmatch(given) else None


def without_hub(name: str) -> str:
    """A name without that of the hub at its beginning."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    return name
