"""Calls whose arguments stand between tags, each as plain text: Qwen3-Coder's and Qwen3.5's, and GLM's.

    <tool_call>                              <tool_call>get_weather
    <function=get_weather>                   <arg_key>city</arg_key>
    <parameter=city>                         <arg_value>Paris</arg_value>
    Paris                                    </tool_call>
    </parameter>
    </function>
    </tool_call>

Whether a value is a string or JSON shows in the tool's schema. A value that may be either is JSON where it reads as
JSON of a type that the schema allows, else a string.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.parsers.reading import Reader, Reading, expect, name_of_tool, read_until, skip_spaces

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_LONGEST_KEY = 256
DEPTH = 16
"""Maximum references and alternatives that are followed to find a value's type."""
_AS_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    """A notation: what stands around the function, the keys and the values."""

    before_name: str
    after_name: str
    """Without white space, as `before_key` and `before_value`."""
    end: str
    """After the last value; empty if that is the call's end."""
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    own_lines: bool
    """Whether a value has a line break before and after it that is not part of it."""


QWEN = Tags("<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>", own_lines=True)
GLM = Tags("", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", own_lines=False)


def reader(tags: Tags) -> Callable[[Reading], Reader[None]]:
    """The parser of answers in this notation."""

    def read(reading: Reading) -> Reader[None]:
        while (yield from read_until(reading.say, OPEN)):
            reading.hold(OPEN)
            name = yield from _name(reading, tags)
            if name is None:
                reading.reject()
                continue
            reading.call(name)
            reading.argue("{")
            if (yield from _parameters(reading, tags, name)):
                reading.argue("}")
            yield from _skip(reading, tags.end)
            yield from _skip(reading, CLOSE)

    return read


def _skip(reading: Reading, text: str) -> Reader[bool]:
    """White space, then this text, if it comes."""
    reading.back((yield from skip_spaces()))
    return (yield from expect(reading, text))


def _name(reading: Reading, tags: Tags) -> Reader[str | None]:
    """The name of a tool that is there, up to the first key or the end; None if there is none."""
    if not (yield from _skip(reading, tags.before_name)):
        return None
    name = yield from name_of_tool(reading)
    if not (yield from expect(reading, tags.after_name)) or not reading.is_tool(name):
        return None
    character = yield from skip_spaces()
    reading.back(character)
    return name if character == "<" else None


def _parameters(reading: Reading, tags: Tags, name: str) -> Reader[bool]:
    """The keys and values of a call; whether they are complete."""
    between = ""
    while (yield from _skip(reading, tags.before_key)):
        key = yield from _key(tags.after_key)
        if key is None or (tags.before_value and not (yield from _skip(reading, tags.before_value))):
            return False
        reading.argue(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from _value(reading, tags, types_of_property(reading.schema_of(name), key))):
            return False
        between = ", "
    character = yield
    reading.back(character)
    return bool(character)


def _key(end: str) -> Reader[str | None]:
    written: list[str] = []
    found = yield from read_until(written.append, end)
    key = "".join(written)
    return key if found and len(key) <= _LONGEST_KEY else None


def _value(reading: Reading, tags: Tags, types: frozenset[str]) -> Reader[bool]:
    """A value, up to its end: a string piece by piece, any other once it is complete. Whether it ended."""
    if types == {"string"}:
        reading.argue('"')
        text = _Unwrapped(lambda character: reading.argue(_escaped(character)), tags.own_lines)
        ended = yield from read_until(text.take, tags.after_value)
        if ended:
            reading.argue('"')
        return ended
    written: list[str] = []
    text = _Unwrapped(written.append, tags.own_lines)
    ended = yield from read_until(text.take, tags.after_value)
    if ended:
        reading.argue(as_json("".join(written), types))
    return ended


class _Unwrapped:
    """Passes text on, less a line break at its beginning and one at its end."""

    def __init__(self, take: Callable[[str], None], wrapped: bool) -> None:
        self._pass, self._first, self._wrapped, self._break = take, wrapped, wrapped, False

    def take(self, text: str) -> None:
        for character in text:
            if self._first:
                self._first = False
                if character == "\n":
                    continue
            if self._break:
                self._pass("\n")
            self._break = self._wrapped and character == "\n"
            if not self._break:
                self._pass(character)


def _escaped(character: str) -> str:
    return json.dumps(character, ensure_ascii=False)[1:-1]


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: as it was written where that is JSON of a type among these, else as a string."""
    written = text.strip()
    if "string" not in types:
        written = _AS_PYTHON.get(written, written)
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or (type_of(value).isdisjoint(types) and "string" in types):
        return written if isinstance(value, str) and "string" not in types else json.dumps(text, ensure_ascii=False)
    return written


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def type_of(value: object) -> frozenset[str]:
    """The types of JSON schema that a value is of."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]})


def types_of_property(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that an object's property may have by its schema; all of them where it says nothing."""
    properties = schema.get("properties")
    given = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema.get("additionalProperties") if given is None else given, schema, DEPTH, {})


def _types(schema: object, root: Mapping[str, Any], depth: int, known: dict[str, frozenset[str]]) -> frozenset[str]:
    """The types that a schema allows; malformed keywords are ignored. `known`: the types behind each `$ref`."""
    if not isinstance(schema, Mapping) or not depth:
        return ALL_TYPES
    found = ALL_TYPES
    said = schema.get("type")
    if isinstance(said, (str, list)):
        found &= {one for one in ([said] if isinstance(said, str) else said) if isinstance(one, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        found &= frozenset().union(*map(type_of, values))
    pointer = schema.get("$ref")
    if isinstance(pointer, str):
        if pointer not in known:
            known[pointer] = ALL_TYPES  # where it leads to itself
            known[pointer] = _types(referenced(pointer, root), root, depth - 1, known)
        found &= known[pointer]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found &= frozenset().union(*(_types(one, root, depth - 1, known) for one in schema[word]))
    parts = schema.get("allOf")
    for one in parts if isinstance(parts, list) else ():
        found &= _types(one, root, depth - 1, known)
    return found or ALL_TYPES


def referenced(pointer: str, root: Mapping[str, Any]) -> object:
    """The target of a JSON pointer within a schema; None if there is none."""
    place: object = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
