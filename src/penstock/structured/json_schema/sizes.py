"""Reads keywords of a schema whose value is a string, a length or a count."""

from penstock.structured.json_schema.document import SchemaError, number, show
from penstock.structured.json_schema.numbers import as_integer
from penstock.structured.json_schema.subschema import Subschema

MAX_SIZE = 2**31
"""Maximum of a length or count; no answer is as long."""


def sizes(schema: Subschema, least: str, most: str) -> dict[str, int]:
    """The given limits of a length or count, by keyword.

    Raises:
        SchemaError: a limit is not a whole number from 0 on, or is larger than any answer.
    """
    found = {}
    for keyword in (least, most):
        if keyword not in schema.keywords:
            continue
        value = number(schema.keywords[keyword])
        size = None if value is None else as_integer(value)
        if size is None or size < 0:
            shown = show(schema.keywords[keyword])
            raise SchemaError(schema.path(keyword), f"it must be a whole number from 0 on, not {shown}")
        if keyword == least and size > MAX_SIZE:
            raise SchemaError(schema.path(keyword), f"no answer is as long: at most {MAX_SIZE}")
        found[keyword] = min(size, MAX_SIZE)
    return found


def string(schema: Subschema, keyword: str) -> str:
    """
    Raises:
        SchemaError: the value is not a string.
    """
    value = schema.keywords[keyword]
    if not isinstance(value, str):
        raise SchemaError(schema.path(keyword), f"it must be a string, not {show(value)}")
    return value
