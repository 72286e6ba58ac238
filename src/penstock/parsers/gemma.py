"""Gemma 4's calls: an object without quotes, its strings between tags.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:[<|"|>C<|"|>]}<tool_call|>

The tags are special tokens.
"""

import json
from collections.abc import Callable

from penstock.parsers.reading import Reader, Reading, expect, name_of_tool, read_until, skip_spaces

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
LONGEST_KEY = 256
_DEEPEST = 64


def read(reading: Reading) -> Reader[None]:
    """Read an answer."""
    while (yield from read_until(reading.emit_text, OPEN)):
        reading.buffer(OPEN)
        reading.push_back((yield from skip_spaces()))
        if not (yield from expect(reading, "call:")):
            reading.reject()
            continue
        name = yield from name_of_tool(reading)
        character = yield from skip_spaces()
        reading.push_back(character)
        if character != "{" or not reading.may_call(name):
            reading.reject()
            continue
        reading.emit_call(name)
        yield from _value(reading, _DEEPEST)
        reading.push_back((yield from skip_spaces()))
        yield from expect(reading, CLOSE)


def _value(reading: Reading, depth: int) -> Reader[bool]:
    """Parse a value as JSON; returns whether it is complete and valid."""
    character = yield from skip_spaces()
    if character == "{" and depth:
        return (yield from _items(reading, "}", lambda: _pair(reading, depth - 1)))
    if character == "[" and depth:
        return (yield from _items(reading, "]", lambda: _value(reading, depth - 1)))
    reading.push_back(character)
    if character == QUOTE[0]:
        return (yield from _string(reading))
    written = ""
    while character := (yield):
        if character in ",]}<":
            reading.push_back(character)
            reading.emit_arguments(_bare(written.strip()))
            return True
        written += character
    return False


def _items(reading: Reading, end: str, item: Callable[[], Reader[bool]]) -> Reader[bool]:
    """Parse the contents after an opening bracket."""
    reading.emit_arguments("{" if end == "}" else "[")
    character = yield from skip_spaces()
    between = ""
    while character != end:
        if not character:
            return False
        if character != "," or not between:
            reading.push_back(character)
            if between:
                return False
        reading.emit_arguments(between)
        if not (yield from item()):
            return False
        between = ", "
        character = yield from skip_spaces()
    reading.emit_arguments(end)
    return True


def _pair(reading: Reading, depth: int) -> Reader[bool]:
    reading.push_back((yield from skip_spaces()))
    written: list[str] = []
    while (character := (yield)) != ":":
        if not character or len(written) == LONGEST_KEY:
            return False
        written.append(character)
    key = "".join(written).strip().removeprefix(QUOTE).removesuffix(QUOTE)
    reading.emit_arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
    return (yield from _value(reading, depth))


def _string(reading: Reading) -> Reader[bool]:
    if not (yield from expect(reading, QUOTE)):
        return False
    reading.emit_arguments('"')
    while (yield from read_until(lambda text: reading.emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1]), "<")):
        if (yield from expect(reading, QUOTE[1:])):
            reading.emit_arguments('"')
            return True
        reading.emit_arguments("<")
    return False


def _bare(written: str) -> str:
    try:
        json.loads(written, parse_constant=lambda _: json.loads(""))
    except ValueError:
        return json.dumps(written, ensure_ascii=False)
    return written
