"""Rewriting of a JSON schema to one that the grammar library enforces exactly.

Each keyword has one handler. Numbers become doubles, formats and ECMA's regular expressions such as the library has,
`oneOf` becomes `anyOf` where its branches exclude each other, references lead to definitions by number. Annotations and
unknown keywords are left out, and what cannot be obeyed is refused with its place.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.structured.json_schema.document import Json, SchemaError, child, number, parse, show
from penstock.structured.json_schema.formats import find_format
from penstock.structured.json_schema.numbers import constant, have_common_multiple, multiple
from penstock.structured.json_schema.overlap import Overlap
from penstock.structured.json_schema.patterns import translate
from penstock.structured.json_schema.places import Place, References
from penstock.structured.json_schema.property_names import allowed_names
from penstock.structured.json_schema.ranges import integer_range, number_range
from penstock.structured.json_schema.sizes import sizes, string
from penstock.structured.json_schema.spots import Spot, spots_of

NOT_OBEYED = frozenset(
    {
        *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that no grammar enforces."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that would need a numeric escape, which keys must not contain."""
_BEFORE_2020 = ("draft-03", "draft-04", "draft-06", "draft-07", "draft/2019-09")

_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf"\\',
}
"""Options for writing JSON. Without numeric escapes a string has one spelling, so that keys can be compared."""

Keywords = dict[str, Any]
"""Of a schema for the library."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema for the library, and what must be checked besides."""

    schema: Keywords
    repeats_keys: bool
    """Whether the library would let an object have a key twice."""
    few_keys: bool = False
    """Whether the keys of some object match a pattern, so that they may be used up."""
    spots: Mapping[str, Spot] = field(default_factory=dict)
    """Facts of each place, to find arrays with `uniqueItems`; empty if there are none."""


def rewrite(text: str) -> Rewritten:
    """
    Raises:
        SchemaError: the text is no schema, or one that cannot be obeyed.
    """
    root = Place("", parse(text))
    try:
        return _Rewriting(root, several_multiples=text.count('"multipleOf"') > 1).run()
    except RecursionError:
        raise SchemaError("", "it is nested too deeply") from None


class _Rewriting:
    def __init__(self, root: Place, several_multiples: bool) -> None:
        self._root = root
        self._several_multiples = several_multiples
        self._references = References(root)
        self._overlap = Overlap(self._references)
        self._definitions: dict[str, str] = {}
        self._pending: list[Place] = []
        self._open = False
        self._unique = False
        self._few_keys = False

    def run(self) -> Rewritten:
        schema = self._schema(self._root)
        definitions = {}
        while self._pending:
            place = self._pending.pop()
            definitions[self._definitions[place.pointer]] = self._schema(place)
        made: Keywords = schema if isinstance(schema, dict) else {"allOf": [schema]}
        made = {**made, "$defs": definitions, "x-guidance": _OPTIONS}
        spots = spots_of(self._root, self._references, self._overlap) if self._unique else {}
        return Rewritten(made, self._open, self._few_keys, spots)

    def _schema(self, place: Place) -> bool | Keywords:
        if not place.keywords:
            self._open = self._open or place.schema is not False
            return place.schema is not False
        self._check_keywords(place)
        if self._several_multiples:
            self._check_multiples(place)
        made: Keywords = {}
        also: list[Keywords] = []
        for handler in dict.fromkeys(_HANDLERS[name] for name in place.keywords if name in _HANDLERS):
            handler(self, place, made, also)
        if also:
            made["allOf"] = [*made.get("allOf", []), *also]
        self._open = self._open or self._is_open(place)
        return made

    def _check_keywords(self, place: Place) -> None:
        missing = sorted(NOT_OBEYED & place.keywords.keys())
        if missing:
            raise SchemaError(place.pointer, f"these keywords are not supported: {', '.join(missing)}")
        if place.pointer and isinstance(place.keywords.get("$id"), str):
            raise SchemaError(place.path("$id"), "a schema within a schema cannot have an $id of its own")

    def _check_multiples(self, place: Place) -> None:
        """Refuse multiples of several numbers at once that the library gets wrong."""
        parts = self._overlap.parts(place, branches=True)
        given = {value for one in parts if (value := number(one.keywords.get("multipleOf"))) is not None}
        if len(given) > 1 and not have_common_multiple(given):
            raise SchemaError(place.pointer, "multiples of all of several numbers cannot be held: they are too large")

    def _is_open(self, place: Place) -> bool:
        """Whether it lets objects have keys that it does not name, or arrays items of any kind.

        Where something else applies to the same value, that says whether it does.
        """
        if not {"const", "enum", "$ref", "allOf", "anyOf", "oneOf", "propertyNames"}.isdisjoint(place.keywords):
            return False
        types = self._overlap.types(place)
        if "array" in types and "items" not in place.keywords:
            return True
        closed = place.keywords.get("additionalProperties") is False and not place.keywords.get("patternProperties")
        return "object" in types and not closed

    # ── what any value may be ────────────────────────────────────────────────────────────────────────────────────────

    def _type(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        listed = place.keywords["type"]
        names = [listed] if isinstance(listed, str) else listed
        if not isinstance(names, list) or not names or not all(name in TYPES for name in names):
            raise SchemaError(place.path("type"), f"it must be one or some of {', '.join(TYPES)}, not {show(listed)}")
        if "number" in names:
            names = [name for name in names if name != "integer"]
        made["type"] = names[0] if len(names) == 1 else list(dict.fromkeys(map(str, names)))

    def _const(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        made["const"] = _literal(place.keywords["const"], place.path("const"))

    def _enum(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        values = place.keywords["enum"]
        if not isinstance(values, list) or not values:
            raise SchemaError(place.path("enum"), f"it must be a list of values, and not empty; not {show(values)}")
        made["enum"] = [_literal(value, place.path("enum", at)) for at, value in enumerate(values)]

    def _reference(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        target = self._references.resolve(place)
        if target.pointer not in self._definitions:
            self._definitions[target.pointer] = str(len(self._definitions))
            self._pending.append(target)
        made["$ref"] = "#/$defs/" + self._definitions[target.pointer]

    def _all_of(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        made["allOf"] = [self._schema(one) for one in place.listed("allOf")]

    def _any_of(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        made["anyOf"] = [self._schema(one) for one in place.listed("anyOf")]

    def _one_of(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        branches = place.listed("oneOf")
        beside = {name: value for name, value in place.keywords.items() if name != "oneOf"}
        whole = [Place(one.path(""), {"allOf": [one.schema, beside]}) for one in branches]
        for (at, first), (other, second) in itertools.combinations(enumerate(whole), 2):
            if not self._overlap.disjoint(first, second):
                raise SchemaError(
                    place.path("oneOf"),
                    f"a value might be of branches {at} and {other} at once, which oneOf forbids and no grammar "
                    "holds: use anyOf, or give the branches a property or type that tells them apart",
                )
        also.append({"anyOf": [self._schema(one) for one in branches]})

    # ── numbers and strings ──────────────────────────────────────────────────────────────────────────────────────────

    def _numbers(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        types = _types_of(place)
        if "number" in types:
            made.update(number_range(place))
        elif "integer" in types:
            made.update(integer_range(place))
        if "multipleOf" in place.keywords:
            value = number(place.keywords["multipleOf"])
            if value is None:
                raise SchemaError(place.path("multipleOf"), f"it must be a number, not {show(value)}")
            made["multipleOf"] = multiple(value, place.path("multipleOf"))

    def _strings(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        if "string" not in _types_of(place):
            return
        lengths = sizes(place, "minLength", "maxLength")
        patterns = []
        if "pattern" in place.keywords:
            patterns.append(translate(string(place, "pattern"), place.path("pattern")))
        if "format" in place.keywords:
            known = find_format(string(place, "format"), place.path("format"))
            if known.pattern is not None:
                patterns.append(f"^(?:{known.pattern})$")
            if known.max_length is not None:
                lengths["maxLength"] = min(known.max_length, lengths.get("maxLength", known.max_length))
            if known.of_library:
                made["format"] = place.keywords["format"]
        made.update(lengths)
        for pattern in patterns:
            if "pattern" in made:
                also.append({"pattern": pattern})
            else:
                made["pattern"] = pattern

    # ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrays(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        if "array" not in _types_of(place):
            return
        made.update(sizes(place, "minItems", "maxItems"))
        if isinstance(place.keywords.get("items"), list):
            made["prefixItems"] = [self._schema(one) for one in place.listed("items")]
            made["items"] = self._schema(place.one("additionalItems"))
        else:
            if "prefixItems" in place.keywords:
                self._check_draft(place)
                made["prefixItems"] = [self._schema(one) for one in place.listed("prefixItems")]
            if "items" in place.keywords:
                made["items"] = self._schema(place.one("items"))
        if place.keywords.get("uniqueItems", False) is not False:
            self._unique_items(place, made)

    def _check_draft(self, place: Place) -> None:
        draft = self._root.keywords.get("$schema")
        if isinstance(draft, str) and any(old in draft for old in _BEFORE_2020):
            raise SchemaError(
                place.path("prefixItems"), f"it is no keyword of {draft}: leave $schema out, or use items"
            )

    def _unique_items(self, place: Place, made: Keywords) -> None:
        pointer = place.path("uniqueItems")
        if place.keywords["uniqueItems"] is not True:
            raise SchemaError(pointer, f"it must be true or false, not {show(place.keywords['uniqueItems'])}")
        item = place.one("items")
        if "prefixItems" in made or self._overlap.types(item) & {"array", "object"}:
            raise SchemaError(
                pointer,
                '"uniqueItems" is held where `items` of the same schema are strings, numbers, booleans or null only',
            )
        values = self._overlap.values(item)
        if values is not None:
            made["maxItems"] = min(len(values), made.get("maxItems", len(values)))
        self._unique = True

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _objects(self, place: Place, made: Keywords, also: list[Keywords]) -> None:
        if "object" not in _types_of(place):
            return
        if "properties" in place.keywords:
            made["properties"] = {name: self._schema(one) for name, one in place.named("properties").items()}
        if "required" in place.keywords:
            made["required"] = list(dict.fromkeys(place.names("required")))
        made.update(sizes(place, "minProperties", "maxProperties"))
        patterns = {}
        for pattern, one in place.named("patternProperties").items():
            written = translate(pattern, place.path("patternProperties", pattern))
            if written in patterns:
                raise SchemaError(one.pointer, "another pattern matches the same names")
            patterns[written] = self._schema(one)
        if patterns:
            made["patternProperties"] = patterns
            self._few_keys = True
        if "additionalProperties" in place.keywords:
            made["additionalProperties"] = self._schema(place.one("additionalProperties"))
        if "propertyNames" in place.keywords:
            self._property_names(place, also)

    def _property_names(self, place: Place, also: list[Keywords]) -> None:
        """Names that are listed become properties, those that match an expression a pattern; no others are allowed."""
        names = allowed_names(place.one("propertyNames"), self._overlap)
        self._open = self._open or not isinstance(names, list)
        if isinstance(names, str):
            self._few_keys = True
            also.append({"patternProperties": {names: True}, "additionalProperties": False})
        elif names is not None:
            also.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})


_Handler = Callable[[_Rewriting, Place, Keywords, list[Keywords]], None]
_HANDLERS: dict[str, _Handler] = {
    "type": _Rewriting._type,
    "const": _Rewriting._const,
    "enum": _Rewriting._enum,
    "$ref": _Rewriting._reference,
    "allOf": _Rewriting._all_of,
    "anyOf": _Rewriting._any_of,
    "oneOf": _Rewriting._one_of,
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        _Rewriting._numbers,
    ),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), _Rewriting._strings),
    **dict.fromkeys(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"), _Rewriting._arrays
    ),
    **dict.fromkeys(
        (
            *("properties", "patternProperties", "additionalProperties", "required"),
            *("minProperties", "maxProperties", "propertyNames"),
        ),
        _Rewriting._objects,
    ),
}


def _types_of(place: Place) -> set[str]:
    """The types that a schema itself allows."""
    listed = place.keywords.get("type", list(TYPES))
    return {str(name) for name in (listed if isinstance(listed, list) else [listed])}


def _literal(value: Json, pointer: str) -> Any:
    """A value for the library to write as it is.

    Raises:
        SchemaError: it would write another one.
    """
    if isinstance(value, list):
        return [_literal(item, child(pointer, at)) for at, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _literal(one, child(pointer, name)) for name, one in value.items()}
    if isinstance(value, str) and (found := _UNWRITTEN.search(value)):
        raise SchemaError(
            pointer,
            f"a string with {found[0]!r} cannot be written: control characters other than "
            "tabulators, line feeds, form feeds, backspaces and carriage returns are left out",
        )
    exact = number(value)
    return value if exact is None else constant(exact, pointer)
