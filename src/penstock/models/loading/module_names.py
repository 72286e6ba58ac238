"""Compiles lists of module names and expressions of a config to one pattern, which `re` matches in bounded time."""

import re
from collections.abc import Sequence
from typing import Any

from penstock.errors import CheckpointError
from penstock.models.hf_config import HFConfig

_EXPRESSION = re.compile(r"\^?(\.\*|\\d\+?|\\\.|\[0-9\]\+?|[\w.-]|\((\?:)?[\w.|-]+\))*\$?")
"""The supported regular expressions: with few stars and no nested repetition `re` takes no exponential time, even on an
untrusted one. It matches names of the model's own, some 60 characters long."""
EXPRESSIONS = r"expressions of names, ., .*, \d+ and (one|other)"
_MOST_NAMES = 20_000
MOST_STARS = 4


def is_expression(text: str) -> bool:
    """Whether it is one of the supported regular expressions."""
    return _EXPRESSION.fullmatch(text) is not None


def module_pattern(section: HFConfig, key: str, names: Sequence[Any], *, parts: bool = True) -> re.Pattern[str] | None:
    """Compile module names (with `*`) and regular expressions (`re:...`) to a pattern of full names; None if empty.

    Args:
        section, key: where they are listed, for errors.
        parts: whether a name also stands for the modules that end with it, and for all that is in them.

    Raises:
        CheckpointError: there are too many, or one is not supported.
    """
    if len(names) > _MOST_NAMES or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{key} in {section.file} must be a list of at most {_MOST_NAMES} names")
    found = []
    for name in dict.fromkeys(names):
        if name.count("*") > MOST_STARS:
            raise section.unsupported(key, name, (f"names with at most {MOST_STARS} *",))
        if not name.startswith("re:"):
            text = ".*".join(map(re.escape, name.strip().split("*")))
            found.append(rf"(.*\.)?{text}(\..*)?" if parts else text)
        elif is_expression(name[3:]):
            found.append(f"{name[3:]}.*")
        else:
            raise section.unsupported(key, name, ("names", EXPRESSIONS))
    return re.compile(rf"(?:{'|'.join(found)})\Z") if found else None
