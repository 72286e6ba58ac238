"""Keywords of one string or one whole number, read from a schema."""

from penstock.structured.json_schema.document import SchemaError, number, show
from penstock.structured.json_schema.numbers import as_integer
from penstock.structured.json_schema.subschema import Subschema

MAX_SIZE = 2**31
"""Maximum of a length or count; no answer is as long."""


def sizes(schema: Subschema, least: str, most: str) -> dict[str, int]:
    """The minimum and maximum of a length or count, by keyword, where given.

    Raises:
        SchemaError: one is no whole number from 0 on, or is more than any answer has.
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
        SchemaError: it is none.
    """
    value = schema.keywords[keyword]
    if not isinstance(value, str):
        raise SchemaError(schema.path(keyword), f"it must be a string, not {show(value)}")
    return value
