"""Keywords of one string or one whole number, read from a schema."""

from penstock.structured.json_schema.document import SchemaError, number, show
from penstock.structured.json_schema.numbers import as_integer
from penstock.structured.json_schema.places import Place

MAX_SIZE = 2**31
"""Maximum of a length or count; no answer is as long."""


def sizes(place: Place, least: str, most: str) -> dict[str, int]:
    """The minimum and maximum of a length or count, by keyword, where given.

    Raises:
        SchemaError: one is no whole number from 0 on, or is more than any answer has.
    """
    found = {}
    for keyword in (least, most):
        if keyword not in place.keywords:
            continue
        value = number(place.keywords[keyword])
        size = None if value is None else as_integer(value)
        if size is None or size < 0:
            shown = show(place.keywords[keyword])
            raise SchemaError(place.path(keyword), f"it must be a whole number from 0 on, not {shown}")
        if keyword == least and size > MAX_SIZE:
            raise SchemaError(place.path(keyword), f"no answer is as long: at most {MAX_SIZE}")
        found[keyword] = min(size, MAX_SIZE)
    return found


def string(place: Place, keyword: str) -> str:
    """
    Raises:
        SchemaError: it is none.
    """
    value = place.keywords[keyword]
    if not isinstance(value, str):
        raise SchemaError(place.path(keyword), f"it must be a string, not {show(value)}")
    return value
