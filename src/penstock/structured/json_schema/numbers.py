"""Numbers that the grammar library represents: doubles, which it writes in decimal.

A constant that is not a double would change, so it is refused. A bound that is not a double moves inwards, to the next
one: every answer still satisfies the schema, and only numbers in the last digits before the bound are never written.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import Context, Decimal
from fractions import Fraction

from penstock.structured.json_schema.document import SchemaError, show
from penstock.structured.json_schema.library import matcher_of

Number = int | Decimal

MAX_INTEGER = 2**63 - 1024
"""The largest double that a signed integer of 64 bits holds."""
MAX_BOUND = 10**17
"""Maximum bound of numbers that need not be whole: the library's ranges have no more digits before the point."""
MAX_MULTIPLE = 2**32
MAX_REMAINDERS = 2**14
"""Maximum states of an automaton for multiples, which compiles in a tenth of a second; its time grows faster."""
_SAFE_DIGITS = 15
_SAFE_PLACES = 22
"""Digits, and digits after the point, that the library's reader of numbers never gets wrong."""
_STEPS = 64
"""Number of neighbouring doubles that are tried."""
_EXACT = Context(prec=1000)


def constant(value: Number, pointer: str) -> int | float:
    """A constant of a schema, as the number to pass to the library.

    Raises:
        SchemaError: the library would write another one.
    """
    whole = as_integer(value)
    if whole is None:
        held = float(value)
        if Decimal(repr(held)) == value and (passed := _passed_for(held)) is not None:
            return passed
    elif abs(whole) <= MAX_INTEGER and int(float(whole)) == whole:
        return whole
    raise SchemaError(
        pointer,
        f"the number {show(value)} would not be written exactly: it is no double (53 bits, some 15 digits); "
        "a string keeps every digit",
    )


def least_integer(value: Number, exclusive: bool, pointer: str) -> int:
    """The smallest integer within a lower bound that the library can hold.

    Raises:
        SchemaError: there is none.
    """
    least = math.ceil(value)
    if exclusive and least == value:
        least += 1
    if least > MAX_INTEGER:
        raise SchemaError(pointer, f"the bound {show(abs(value))} is too large: integers have at most 63 bits")
    held = float(max(least, -MAX_INTEGER))
    # The conversion to a double may have rounded down, below the bound.
    return int(held if held >= least else math.nextafter(held, math.inf))


def least_number(value: Number, pointer: str) -> tuple[int | float, bool]:
    """The smallest lower bound from `value` on that the library can hold, and whether it equals `value`.

    Raises:
        SchemaError: there is none.
    """
    if value > MAX_BOUND:
        raise SchemaError(pointer, f"the bound {show(abs(value))} is too large: at most 10^17 is enforced")
    # For a bound closer to 0 than any number that the library can hold, the search begins at the closest of those.
    tiny = 0 < abs(Decimal(value)) < Decimal(1).scaleb(-_SAFE_PLACES)
    nearest = math.ceil(value) * 10.0**-_SAFE_PLACES if tiny else max(float(value), float(-MAX_BOUND))
    for held in _from(nearest, math.inf):
        written = Decimal(repr(held))
        passed = _passed_for(held)
        if written >= value and passed is not None and (held % 1 or written == int(held)):
            return passed, written == value
    raise SchemaError(pointer, f"the bound {show(abs(value))} cannot be enforced")


def next_number(value: Number) -> Decimal:
    """The next double above `value`; above 0, the smallest number that the library can hold."""
    step = Decimal(1).scaleb(-_SAFE_PLACES)
    return step if value == 0 else Decimal(repr(math.nextafter(float(value), math.inf)))


def multiple(value: Number, pointer: str) -> int | float:
    """The value of `multipleOf`, as the number to pass to the library.

    Raises:
        SchemaError: it is not above 0, or the library would take another one.
    """
    if value <= 0:
        raise SchemaError(pointer, f"it must be above 0, not {show(value)}")
    held = _held_multiple(value)
    if held is None:
        raise SchemaError(pointer, f"multiples of {show(value)} cannot be enforced: it has too many digits")
    if _num_remainders([value]) > MAX_REMAINDERS:
        most = f"its digits, without the factors 2 and 5, may be at most {MAX_REMAINDERS}"
        raise SchemaError(pointer, f"multiples of {show(value)} take too long to compile: {most}")
    return held


def _held_multiple(value: Number) -> int | float | None:
    whole = as_integer(value)
    if whole is not None:
        return whole if whole < MAX_MULTIPLE else None
    for held in (*_from(float(value), 0.0, 8), *_from(float(value), 1.0 + float(value), 8)):
        if _scaled(held) == value and (passed := _passed_for(held)) is not None:
            return passed
    return None


def have_common_multiple(values: Iterable[Number]) -> bool:
    """Whether the library finds the least common multiple of these in time; it multiplies them in 32 bits."""
    listed = list(values)
    return math.prod(_scaled_together(listed)) < MAX_MULTIPLE and _num_remainders(listed) <= MAX_REMAINDERS


def _num_remainders(values: Sequence[Number]) -> int:
    """States that the digits of a common multiple pass through: its factors other than those of 10."""
    common = math.lcm(*_scaled_together(values))
    for factor in (2, 5):
        while common and common % factor == 0:
            common //= factor
    return common


def _scaled_together(values: Sequence[Number]) -> list[int]:
    """The numbers, times the power of 10 that makes all of them whole."""
    fractions = [Fraction(value) for value in values]
    scale = 10 ** max(_places(fraction) for fraction in fractions)
    return [int(fraction * scale) for fraction in fractions]


def _places(value: Fraction) -> int:
    """Number of digits after the point."""
    return next(places for places in itertools.count() if (value * 10**places).denominator == 1)


def negative(value: Number) -> Number:
    """The exact negation: `-` rounds a `Decimal`."""
    return -value if isinstance(value, int) else value.copy_negate()


def as_integer(value: Number) -> int | None:
    """The number as an integer if it is integral (1.0 is), else None."""
    return int(value) if value == math.floor(value) else None


def _from(start: float, towards: float, steps: int = _STEPS) -> Iterator[float]:
    for _ in range(steps):
        yield start
        start = math.nextafter(start, towards)


def _scaled(value: float) -> Decimal:
    """The library's value of a fraction, which it multiplies by 10, in doubles, until it is whole."""
    places = 0
    while value % 1 and places <= _SAFE_PLACES:
        value *= 10
        places += 1
    return Decimal(int(value)).scaleb(-places, _EXACT) if value < MAX_MULTIPLE else Decimal(0)


def _passed_for(value: float) -> int | float | None:
    """The number to pass to the library so that it holds this double; None if there is none.

    Its reader is off by one double for about a tenth of those with 16 or 17 digits.
    """
    if value % 1 == 0:
        return int(value)
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    if len(digits) <= _SAFE_DIGITS and exponent >= -_SAFE_PLACES:
        return value
    # The library may read a neighbour as this double.
    neighbours = (value, math.nextafter(value, math.inf), math.nextafter(value, -math.inf))
    return next((neighbour for neighbour in neighbours if _written(neighbour) == value), None)


def _written(value: float) -> float:
    """The double that the library writes for a number."""
    return float(matcher_of({"const": value}).compute_ff_bytes() or b"nan")
