"""The JSON schemas inside of a grammar in Lark's notation.

%json {schema}               a document of the schema
%json_if_possible {schema}   the same if the schema can be enforced, else any document of its type
%json {schema} // name       refusals name it
"""

import json
import re
from collections.abc import Callable
from typing import Any

from penstock.structured.json_schema.document import SchemaError
from penstock.structured.json_schema.rewrite import Rewritten, rewrite

_LEXEME = re.compile(
    r"""(?P<json>%json(?P<optional>_if_possible)?\s*)
    | (?:\#|//)[^\n]*             # a comment
    | "(?:\\.|[^"\\])*"
    | /(?:\\.|[^/\\])+/
    | .""",
    re.VERBOSE | re.DOTALL,
)
_NAME = re.compile(r"[^\S\n]*//\s*([^\n]*)")

Keep = Callable[[Rewritten], bool]
"""Whether a schema stays that is enforced only if possible."""


def has_optional_schemas(grammar: str) -> bool:
    """Whether some of a grammar's schemas are enforced only if possible."""
    return "%json_if_possible" in grammar


def rewrite_schemas(grammar: str, keep: Keep = lambda schema: True) -> tuple[str, list[Rewritten]]:
    """A grammar in which each schema is one that the library obeys to the letter, and what they leave to others.

    Raises:
        SchemaError: one cannot be enforced.
    """
    pieces: list[str] = []
    schemas: list[Rewritten] = []
    at = 0
    while found := _LEXEME.match(grammar, at):
        at = found.end()
        if not found["json"]:
            pieces.append(found[0])
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(grammar, at)
        except (json.JSONDecodeError, RecursionError) as error:
            raise SchemaError("", f"after %json there is no JSON: {error}") from error
        if found["optional"]:
            schemas.append(_kept(grammar[at:end], keep) or _of_type(value))
        else:
            schemas.append(_named(grammar, at, end))
        pieces.append(f"%json {json.dumps(schemas[-1].schema)}")
        at = end
    return "".join(pieces), schemas


def _kept(text: str, keep: Keep) -> Rewritten | None:
    """A schema; None if it cannot be enforced, or must not be kept."""
    try:
        made = rewrite(text)
    except SchemaError:
        return None
    return made if keep(made) else None


def _of_type(value: Any) -> Rewritten:
    """A schema reduced to its type."""
    try:
        return rewrite(json.dumps({"type": value.get("type")} if isinstance(value, dict) else True))
    except SchemaError:
        return rewrite("true")


def _named(grammar: str, at: int, end: int) -> Rewritten:
    """The schema between two places; if it is refused, the error begins with the name after it.

    Raises:
        SchemaError: it cannot be enforced.
    """
    try:
        return rewrite(grammar[at:end])
    except SchemaError as error:
        if name := _NAME.match(grammar, end):
            raise SchemaError(name[1], str(error)) from error
        raise
