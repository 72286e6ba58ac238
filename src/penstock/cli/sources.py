"""Sources of options, in order of precedence: flags, environment, TOML file.

--max-num-seqs 64        PENSTOCK_MAX_NUM_SEQS=64        max_num_seqs = 64  (TOML, a flat table)
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field
from typing import Any

from penstock.config.engine_config import FOREIGN_OPTIONS, foreign_hint
from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.system.toml import read_toml

PREFIX = "PENSTOCK_"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
NO_OPTIONS = frozenset({CONFIG_VARIABLE, "PENSTOCK_ISA", "PENSTOCK_LIBRARY"})
"""Environment variables that are not options: read by the command line itself, and by `penstock.native`."""
SECRET = frozenset({"api_key"})
"""Options whose values are not printed."""


@dataclass(frozen=True, slots=True)
class Given:
    """An option's value as it was given, and its source."""

    value: Any
    source: str


FLAG = "flag"
"""The source of options given on the command line."""


def name_sources(error: ConfigError, given: Mapping[str, Given]) -> str:
    """The error's message, with the source of each option that it concerns, except for the command line."""
    message = str(error)
    sources = [
        f"{name} is from {option.source}"
        for name, option in given.items()
        if option.source != FLAG and option.source not in message and _is_about(message, name, option.value)
    ]
    return f"{message} ({', '.join(sources)})" if sources else message


def _is_about(message: str, name: str, value: Any) -> bool:
    """Whether a message names the option or, if it is a path or a hub id, its value."""
    is_named = re.search(rf"\b{name}\b", message) is not None
    return is_named or (isinstance(value, str) and name not in SECRET and "/" in value and value in message)


def gather(
    options: "Iterable[Field[Any]]", flags: Mapping[str, Any], environment: Mapping[str, str], path: str | None
) -> dict[str, Given]:
    """Collect the value and source of each given option.

    Args:
        flags: by the options' names.
        path: the TOML file, if there is one.

    Raises:
        ConfigError: the file cannot be read, or it or the environment names an unknown option.
    """
    known = {f.name: f for f in options}
    given = {} if path is None else dict(_from_file(path, known))
    given.update(_from_environment(environment, known))
    given.update((name, Given(value, FLAG)) for name, value in flags.items())
    return given


def _from_file(path: str, known: Mapping[str, Any]) -> Iterator[tuple[str, Given]]:
    for name, value in read_toml(path).items():
        if name not in known:
            raise ConfigError(f"{path}: unknown option {name!r}{_nearest(name, known)}")
        is_table = isinstance(value, dict) and known[name].metadata["is_json"]
        if not is_table and not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"{path}: {name} must be a single value, not a table or a list")
        yield name, Given(value, path)


def _from_environment(environment: Mapping[str, str], known: Mapping[str, Any]) -> Iterator[tuple[str, Given]]:
    for variable, value in environment.items():
        name = variable[len(PREFIX) :].lower()
        if not variable.startswith(PREFIX) or variable in NO_OPTIONS or _is_of_kubernetes(variable, value):
            continue
        if name not in known:
            raise ConfigError(f"the environment has {variable}, but there is no option {name!r}{_nearest(name, known)}")
        yield name, Given(value, variable)


def _is_of_kubernetes(variable: str, value: str) -> bool:
    """Whether Kubernetes set this variable for a service named penstock: PENSTOCK_PORT=tcp://10.0.0.1:8000."""
    return value.startswith("tcp://") or "_SERVICE_" in variable or "_TCP" in variable


def _nearest(name: str, known: Iterable[str]) -> str:
    if name in FOREIGN_OPTIONS:
        return foreign_hint(name)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def show(
    groups: "Iterable[tuple[str, Iterable[Field[Any]]]]", values: Mapping[str, Any], given: Mapping[str, Given]
) -> str:
    """Format every option with its value and source as a file for `--config`, without secrets.

    Args:
        groups: title and options.
        values: of all options, parsed.
    """
    lines = []
    for title, options in groups:
        lines.append(f"# ── {title} " + "─" * (76 - len(title)))
        for f in options:
            value, source = values[f.name], given[f.name].source if f.name in given else "default"
            if f.name in SECRET and value is not None:
                lines.append(f"# {f.name} is set, but not shown ({source})")
            elif value is None:
                lines.append(f"# {f.name} is not set ({source})")
            else:
                lines.append(f"{f.name} = {json.dumps(value, ensure_ascii=False)}  # {source}")
    return "\n".join(lines)
