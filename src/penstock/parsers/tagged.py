"""Calls with each argument as plain text between tags: Qwen3-Coder's, Qwen3.5's and GLM's.

    <tool_call>                              <tool_call>get_weather
    <function=get_weather>                   <arg_key>city</arg_key>
    <parameter=city>                         <arg_value>Paris</arg_value>
    Paris                                    </tool_call>
    </parameter>
    </function>
    </tool_call>

The tool's schema decides whether a value is a string or JSON. A value that may be either (as any value of a tool that
is not offered) is JSON if it parses as JSON of an allowed type other than string, else a string.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.dataclass import dataclass
from penstock.parsers.reading import Reader, Reading, expect, name_of_tool, read_until, skip_spaces

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_LONGEST_KEY = 256
DEPTH = 16
"""Maximum number of references and alternatives followed to find a value's type."""
_MOST_ALTERNATIVES = 256
"""Maximum number of schemas that are searched for a property, the whole among them."""
_AS_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format: around the function, the keys and the values."""

    before_name: str
    after_name: str
    """Without white space, as `before_key` and `before_value`."""
    end: str
    """Tag after the last value; empty if the call's end follows."""
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    own_lines: bool
    """Whether a line break that is not part of the value precedes and follows it."""


QWEN = Tags("<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>", own_lines=True)
GLM = Tags("", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", own_lines=False)


def reader(tags: Tags) -> Callable[[Reading], Reader[None]]:
    """The parser of answers in this format."""

    def read(reading: Reading) -> Reader[None]:
        while (yield from read_until(reading.emit_text, OPEN)):
            reading.buffer(OPEN)
            name = yield from _name(reading, tags)
            if name is None:
                reading.reject()
                continue
            reading.emit_call(name)
            reading.emit_arguments("{")
            if (yield from _parameters(reading, tags, name)):
                reading.emit_arguments("}")
            yield from _skip(reading, tags.end)
            yield from _skip(reading, CLOSE)

    return read


def _skip(reading: Reading, text: str) -> Reader[bool]:
    """Skip white space, then consume `text` if it follows."""
    reading.push_back((yield from skip_spaces()))
    return (yield from expect(reading, text))


def _name(reading: Reading, tags: Tags) -> Reader[str | None]:
    """Parse the name of the called tool, up to the first key or the end; None if there is none."""
    if not (yield from _skip(reading, tags.before_name)):
        return None
    name = yield from name_of_tool(reading)
    if not (yield from expect(reading, tags.after_name)) or not reading.may_call(name):
        return None
    character = yield from skip_spaces()
    reading.push_back(character)
    # Text may quote the beginning of a call; what follows the name tells.
    return name if character == "<" else None


def _parameters(reading: Reading, tags: Tags, name: str) -> Reader[bool]:
    """Parse the keys and values of a call; returns whether they are complete."""
    between = ""
    while (yield from _skip(reading, tags.before_key)):
        key = yield from _key(tags.after_key)
        if key is None or (tags.before_value and not (yield from _skip(reading, tags.before_value))):
            return False
        reading.emit_arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from _value(reading, tags, types_of_property(reading.schema_of(name), key))):
            return False
        between = ", "
    character = yield
    reading.push_back(character)
    return bool(character)


def _key(end: str) -> Reader[str | None]:
    written: list[str] = []
    found = yield from read_until(written.append, end)
    key = "".join(written)
    return key if found and len(key) <= _LONGEST_KEY else None


def _value(reading: Reading, tags: Tags, types: frozenset[str]) -> Reader[bool]:
    """Parse a value up to its end: a string piece by piece, any other at once. Returns whether the end was found."""
    if types == {"string"}:
        reading.emit_arguments('"')
        text = _Unwrapped(lambda character: reading.emit_arguments(_escaped(character)), tags.own_lines)
        ended = yield from read_until(text.take, tags.after_value)
        if ended:
            reading.emit_arguments('"')
        return ended
    written: list[str] = []
    text = _Unwrapped(written.append, tags.own_lines)
    ended = yield from read_until(text.take, tags.after_value)
    if ended:
        reading.emit_arguments(as_json("".join(written), types))
    return ended


class _Unwrapped:
    """Passes text on without a line break at the beginning and one at the end."""

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
    """The value as JSON: unchanged if it is JSON of one of these types, else as a string."""
    written = text.strip()
    # Models write Python's words, too; where a string is allowed they may be text.
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
    """The JSON schema types of a value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]})


class TypesOfProperties:
    """The types of an object's properties by its schema. The target of a reference is read once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._of_values = _Types(schema, _own_types)

    def of(self, key: str) -> frozenset[str]:
        """The types of a property; all types if the schema does not restrict them."""

        def of_property(schema: Mapping[str, Any]) -> frozenset[str] | None:
            properties, patterns, others = (
                schema.get(word) for word in ("properties", "patternProperties", "additionalProperties")
            )
            if isinstance(properties, Mapping) and key in properties:
                return self._of_values.of(properties[key])
            # Patterns are not matched with the key: that may take exponential time.
            given = [*(patterns.values() if isinstance(patterns, Mapping) else ())]
            given += [others] if isinstance(others, Mapping) else []
            return _either(self._of_values.of(value) for value in given)

        return _Types(self._schema, of_property, most=_MOST_ALTERNATIVES).of(self._schema) or ALL_TYPES

    def of_value(self, schema: object) -> frozenset[str]:
        """The types of a value by a subschema."""
        return self._of_values.of(schema) or ALL_TYPES


def types_of_property(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types of an object's property by its schema; all types if the schema does not restrict them."""
    return TypesOfProperties(schema).of(key)


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that `type`, `enum` and `const` of a schema allow; malformed ones are ignored."""
    found = ALL_TYPES
    said = schema.get("type")
    if isinstance(said, (str, list)):
        found &= {name for name in ([said] if isinstance(said, str) else said) if isinstance(name, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        found &= frozenset().union(*map(type_of, values))
    return found


def _either(found: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """The union of several schemas' types; None if none restricts them."""
    said = [types for types in found if types is not None]
    return frozenset().union(*said) if said else None


class _Types:
    """Collects types over a schema's references and alternatives, in linear time."""

    def __init__(
        self,
        root: Mapping[str, Any],
        own: Callable[[Mapping[str, Any]], frozenset[str] | None],
        most: int | None = None,
    ) -> None:
        """
        Args:
            root: the schema that references point into.
            own: the types by a schema's own keywords; None if they do not restrict them.
            most: maximum number of schemas to read; further ones allow all types.
        """
        self._root, self._own, self._most = root, own, most
        self._visited = 0
        self._known: dict[tuple[str, int], frozenset[str] | None] = {}
        """The types behind each `$ref` by remaining depth, so independent of what was read before."""

    def of(self, schema: object, depth: int = DEPTH) -> frozenset[str] | None:
        """The types that a schema allows, None if it does not restrict them; malformed keywords are ignored."""
        self._visited += 1
        if not isinstance(schema, Mapping) or not depth or (self._most is not None and self._visited > self._most):
            return ALL_TYPES
        said = [self._own(schema)]
        pointer = schema.get("$ref")
        if isinstance(pointer, str):
            target = (pointer, depth)
            if target not in self._known:
                self._known[target] = self.of(referenced(pointer, self._root), depth - 1)
            said.append(self._known[target])
        either, other, both = (schema.get(word) for word in ("anyOf", "oneOf", "allOf"))
        for parts in (either, other):
            said += [_either(self.of(part, depth - 1) for part in parts)] if isinstance(parts, list) else []
        said += [self.of(part, depth - 1) for part in both] if isinstance(both, list) else []
        found = [types for types in said if types is not None]
        return (ALL_TYPES.intersection(*found) or ALL_TYPES) if found else None


def referenced(pointer: str, root: Mapping[str, Any]) -> object:
    """The target of a JSON pointer within a schema; None if there is none."""
    place: object = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
