"""TOML files: the server's options, and its API keys."""

import sys
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


def read_toml(path: str | Path) -> dict[str, Any]:
    """A file's content.

    Raises:
        ConfigError: it cannot be read, or is not TOML. The message quotes none of its content, which may have secrets.
    """
    if sys.version_info >= (3, 11):  # here: most starts read no such file
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = str(error).rpartition("(")[2].rstrip(")")
        raise ConfigError(f"{path} is not valid TOML: {where}") from None
