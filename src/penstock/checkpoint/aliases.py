"""Short names of models: `penstock pull Qwen/Qwen3-0.6B-GGUF:Q8_0 --as qwen`, then `--model qwen`.

They are in a JSON file of the user's, `~/.config/penstock/aliases.json`: {name: hub id or path}.
"""

import json
import os
import re
from pathlib import Path

from penstock.errors import ConfigError, shown

_NAME = re.compile(r"[\w][\w.-]{0,95}", re.ASCII)
_MAX_BYTES = 2**20


def aliases_file() -> Path:
    """The file of the user's aliases."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "penstock" / "aliases.json"


def read_aliases() -> dict[str, str]:
    """All aliases, by name.

    Raises:
        ConfigError: the file is damaged.
    """
    file = aliases_file()
    try:
        if not os.path.isfile(file):  # nor in a home that this user may not enter
            return {}
        with file.open("rb") as opened:
            read = json.loads(opened.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the aliases in {file} cannot be read: {error}; mend or delete the file") from None
    if not isinstance(read, dict) or not all(isinstance(model, str) for model in read.values()):
        raise ConfigError(f"the aliases in {file} must be an object of names and models; mend or delete the file")
    return read


def add_alias(name: str, model: str) -> None:
    """Add an alias, or replace the one of this name.

    Raises:
        ConfigError: it is no name, or a path in the current folder has it, or the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"an alias must be 1 to 96 letters, digits, ., _ and -, not {shown(name)}")
    if Path(name).exists():
        raise ConfigError(f"there is a file or folder {name} here, which would be meant: choose another alias")
    _write(read_aliases() | {name: model})


def remove_alias(name: str) -> bool:
    """Remove an alias; returns whether there was one. Raises as `add_alias`."""
    known = read_aliases()
    if name not in known:
        return False
    _write({alias: model for alias, model in known.items() if alias != name})
    return True


def _write(aliases: dict[str, str]) -> None:
    file = aliases_file()
    written = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(aliases, indent=2, ensure_ascii=False, sort_keys=True) + "\n")
        written.replace(file)
    except OSError as error:
        raise ConfigError(f"the aliases cannot be written to {file}: {error}") from None
