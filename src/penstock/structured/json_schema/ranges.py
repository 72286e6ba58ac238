"""The bounds of numbers in a schema, as the grammar library can hold them."""

import math
from collections.abc import Sequence

from penstock.structured.json_schema.document import SchemaError, number, show
from penstock.structured.json_schema.numbers import (
    MAX_INTEGER,
    Number,
    least_integer,
    least_number,
    negative,
    next_number,
)
from penstock.structured.json_schema.subschema import Subschema

Bound = tuple[Number, bool]
"""(limit, whether it is exclusive)."""
_MAX_OPEN = 10**18
"""Magnitude from which on the library needs a bound at the other end, too."""


def integer_range(schema: Subschema) -> dict[str, int]:
    """The library's keywords for the range of integers that a schema allows.

    Raises:
        SchemaError: the library can hold none of them, or a bound is not a number.
    """
    lows, highs = _bounds(schema, "minimum", "exclusiveMinimum"), _bounds(schema, "maximum", "exclusiveMaximum")
    made = {}
    if lows:
        made["minimum"] = max(least_integer(*bound, schema.pointer) for bound in lows)
    if highs:
        made["maximum"] = -max(least_integer(*bound, schema.pointer) for bound in _mirrored(highs))
    if made.get("minimum", 0) >= _MAX_OPEN:
        made.setdefault("maximum", MAX_INTEGER)
    if made.get("maximum", 0) <= -_MAX_OPEN:
        made.setdefault("minimum", -MAX_INTEGER)
    if lows and highs and made["minimum"] > made["maximum"] and _holds_integers(lows, highs):
        raise _too_narrow(schema)
    return made


def number_range(schema: Subschema) -> dict[str, int | float]:
    """The library's keywords for the range of numbers that a schema allows.

    Raises:
        SchemaError: the library can hold none of them, or a bound is not a number.
    """
    lows, highs = _bounds(schema, "minimum", "exclusiveMinimum"), _bounds(schema, "maximum", "exclusiveMaximum")
    made: dict[str, int | float] = {}
    # Upper bounds are lower bounds of the negated numbers, so each rule is written once.
    lows, highs = _beyond(lows, highs), _mirrored(_beyond(_mirrored(highs), _mirrored(lows)))
    for value, excluded in lows:
        bound, same = least_number(value, schema.pointer)
        name = "exclusiveMinimum" if excluded and same else "minimum"
        made[name] = max(bound, made.get(name, bound))
    for value, excluded in _mirrored(highs):
        bound, same = least_number(value, schema.pointer)
        name = "exclusiveMaximum" if excluded and same else "maximum"
        made[name] = min(-bound, made.get(name, -bound))
    low = max((made[name] for name in ("minimum", "exclusiveMinimum") if name in made), default=-math.inf)
    high = min((made[name] for name in ("maximum", "exclusiveMaximum") if name in made), default=math.inf)
    if low > high and max(value for value, _ in lows) <= min(value for value, _ in highs):
        raise _too_narrow(schema)
    return made


def _beyond(lows: Sequence[Bound], highs: Sequence[Bound]) -> list[Bound]:
    """`lows`, but for an excluded whole number less than 1 below all `highs` the next number that the library holds.

    Between two such bounds the library would write the excluded number.
    """
    high = min((value for value, _ in highs), default=math.inf)
    return [
        (next_number(value), False)
        if excluded and value == int(value) and value < high < value + 1
        else (value, excluded)
        for value, excluded in lows
    ]


def _bounds(schema: Subschema, keyword: str, exclusive: str) -> list[Bound]:
    """The bounds at one end. In draft 4 the second keyword is a boolean: whether the first one is exclusive."""
    given = []
    if keyword in schema.keywords:
        given.append((_number(schema, keyword), schema.keywords.get(exclusive) is True))
    if not isinstance(schema.keywords.get(exclusive, False), bool):
        given.append((_number(schema, exclusive), True))
    return given


def _number(schema: Subschema, keyword: str) -> Number:
    value = number(schema.keywords[keyword])
    if value is None:
        raise SchemaError(schema.path(keyword), f"it must be a number, not {show(schema.keywords[keyword])}")
    return value


def _mirrored(bounds: Sequence[Bound]) -> list[Bound]:
    return [(negative(value), excluded) for value, excluded in bounds]


def _holds_integers(lows: Sequence[Bound], highs: Sequence[Bound]) -> bool:
    first = max(math.floor(value) + 1 if excluded else math.ceil(value) for value, excluded in lows)
    last = min(math.ceil(value) - 1 if excluded else math.floor(value) for value, excluded in highs)
    return first <= last


def _too_narrow(schema: Subschema) -> SchemaError:
    return SchemaError(
        schema.pointer,
        "no double (53 bits, some 15 digits) is within the bounds, and others would not be written exactly",
    )
