"""Parses JSON exactly: numbers keep every digit, and input on which parsers disagree (repeated keys) is refused."""

import json
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import TypeAlias

Json: TypeAlias = "bool | int | Decimal | str | list[Json] | dict[str, Json] | None"

MAX_DIGITS = 400
"""Maximum digits of a number, and maximum exponent; doubles reach 10^308."""


class SchemaError(Exception):
    """A schema that cannot be enforced; the message has the reason and its JSON pointer."""

    def __init__(self, pointer: str, reason: str) -> None:
        """
        Args:
            pointer: the place in the schema as a JSON pointer (RFC 6901); empty for the whole of it.
        """
        super().__init__(f"{pointer}: {reason}" if pointer else reason)


def parse(text: str) -> Json:
    """
    Raises:
        SchemaError: it is not JSON, nested too deeply, has a key twice in one object, or an unpaired surrogate.
    """
    try:
        value: Json = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_fraction, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise SchemaError("", f"it is not JSON: {error}") from error
    except RecursionError:
        raise SchemaError("", "it is nested too deeply") from None
    for pointer, string in strings(value):
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise SchemaError(pointer, f"{string[:80]!r} contains an unpaired surrogate")
    return value


def child(pointer: str, *steps: str | int) -> str:
    """The JSON pointer to a value within the one at `pointer`."""
    return pointer + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def strings(value: Json) -> Iterator[tuple[str, str]]:
    """(JSON pointer, string) of all strings in a value, including property names."""
    pending = [("", value)]
    while pending:
        pointer, value = pending.pop()
        if isinstance(value, str):
            yield pointer, value
        elif isinstance(value, list):
            pending += [(child(pointer, index), item) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            yield from ((pointer, name) for name in value)
            pending += [(child(pointer, name), item) for name, item in value.items()]


def number(value: Json) -> int | Decimal | None:
    """The value if it is a number, which true and false are not; else None."""
    return value if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else None


def show(value: Json) -> str:
    """A value as JSON for a message, shortened if it is long."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise SchemaError("", f"an object has the key {show(twice)} twice")
    return made


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise SchemaError("", f"the number {text[:20]}... has {len(text)} digits; at most {MAX_DIGITS}")
    return int(text)


def _fraction(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise SchemaError("", f"the number {text[:40]} is out of range") from None
    if len(text) > MAX_DIGITS or abs(value.adjusted()) > MAX_DIGITS:
        raise SchemaError("", f"the number {text[:40]} is out of range: exponents are at most {MAX_DIGITS}")
    return value


def _refuse_constant(text: str) -> Json:
    raise SchemaError("", f"{text} is not JSON")
