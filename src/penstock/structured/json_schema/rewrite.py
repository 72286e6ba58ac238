"""Rewrites a JSON schema to one that the grammar library enforces exactly.

Each keyword has one handler. Numbers become doubles, formats and ECMA's regular expressions such as the library has,
`oneOf` becomes `anyOf` where its branches exclude each other, references lead to definitions by number. Annotations and
unknown keywords are left out, and what cannot be enforced is refused with its JSON pointer.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from penstock.api.subschemas import map_schemas, without_nulls
from penstock.dataclass import dataclass
from penstock.structured.json_schema.document import Json, SchemaError, child, number, parse, show
from penstock.structured.json_schema.formats import find_format
from penstock.structured.json_schema.library import is_string_possible
from penstock.structured.json_schema.numbers import constant, have_common_multiple, multiple
from penstock.structured.json_schema.overlap import Overlap
from penstock.structured.json_schema.patterns import translate, translate_one
from penstock.structured.json_schema.property_names import allowed_names
from penstock.structured.json_schema.ranges import integer_range, number_range
from penstock.structured.json_schema.sizes import sizes, string
from penstock.structured.json_schema.spots import PartConstraints, spots_of
from penstock.structured.json_schema.subschema import References, Subschema

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
"""Keywords of a schema for the library."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema for the library, and constraints that it does not enforce."""

    schema: Keywords
    repeats_keys: bool
    """Whether the library would let an object have a key twice."""
    few_keys: bool = False
    """Whether a pattern limits the keys of an object, so that it may run out of unused ones."""
    spots: Mapping[str, PartConstraints] = field(default_factory=dict)
    """Facts of each schema, to find arrays with `uniqueItems`; empty if there are none."""


def rewrite(text: str) -> Rewritten:
    """
    Raises:
        SchemaError: the text is not a schema, or one that cannot be enforced.
    """
    value = parse(text)
    try:
        root = Subschema("", map_schemas(value, _plain))
        return _Rewriting(root, several_multiples=text.count('"multipleOf"') > 1).run()
    except RecursionError:
        raise SchemaError("", "it is nested too deeply") from None


def _plain(schema: Keywords) -> Keywords | bool:
    """A schema without keywords that are null; one that forbids everything (`not: {}`) as false."""
    plain = without_nulls(schema)
    excluded = plain.get("not")
    return False if excluded == {} or excluded is True else plain


class _Rewriting:
    def __init__(self, root: Subschema, several_multiples: bool) -> None:
        self._root = root
        self._several_multiples = several_multiples
        self._references = References(root)
        self._overlap = Overlap(self._references)
        self._definitions: dict[str, str] = {}
        self._pending: list[Subschema] = []
        self._open = False
        self._unique = False
        self._few_keys = False

    def run(self) -> Rewritten:
        whole = self._schema(self._root)
        definitions = {}
        # Each target of a reference once, so that recursive schemas come to an end.
        while self._pending:
            schema = self._pending.pop()
            definitions[self._definitions[schema.pointer]] = self._schema(schema)
        made: Keywords = whole if isinstance(whole, dict) else {"allOf": [whole]}
        made = {**made, "$defs": definitions, "x-guidance": _OPTIONS}
        spots = spots_of(self._root, self._references, self._overlap) if self._unique else {}
        return Rewritten(made, self._open, self._few_keys, spots)

    def _schema(self, schema: Subschema) -> bool | Keywords:
        if not schema.keywords:
            self._open = self._open or schema.value is not False
            return schema.value is not False
        self._check_keywords(schema)
        if self._several_multiples:
            self._check_multiples(schema)
        made: Keywords = {}
        also: list[Keywords] = []
        # Once each, as several keywords share a handler.
        for handler in dict.fromkeys(_HANDLERS[name] for name in schema.keywords if name in _HANDLERS):
            handler(self, schema, made, also)
        if also:
            made["allOf"] = [*made.get("allOf", []), *also]
        self._open = self._open or self._is_open(schema)
        return made

    def _check_keywords(self, schema: Subschema) -> None:
        schema.check_keywords()
        if schema.pointer and isinstance(schema.keywords.get("$id"), str):
            raise SchemaError(schema.path("$id"), "a schema within a schema cannot have an $id of its own")

    def _check_multiples(self, schema: Subschema) -> None:
        """Refuse multiples of several numbers at once that the library gets wrong."""
        parts = self._overlap.parts(schema, branches=True)
        given = {value for part in parts if (value := number(part.keywords.get("multipleOf"))) is not None}
        if len(given) > 1 and not have_common_multiple(given):
            raise SchemaError(
                schema.pointer, "multiples of all of several numbers cannot be enforced: they are too large"
            )

    def _is_open(self, schema: Subschema) -> bool:
        """Whether it allows objects with keys that it does not name, or arrays with items of any kind.

        False if other schemas apply to the same value: each of them is checked by itself.
        """
        if not {"const", "enum", "$ref", "allOf", "anyOf", "oneOf", "propertyNames"}.isdisjoint(schema.keywords):
            return False
        types = self._overlap.types(schema)
        if "array" in types and "items" not in schema.keywords:
            return True
        closed = schema.keywords.get("additionalProperties") is False and not schema.keywords.get("patternProperties")
        return "object" in types and not closed

    # ── what any value may be ────────────────────────────────────────────────────────────────────────────────────────

    def _type(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        listed = schema.keywords["type"]
        names = [listed] if isinstance(listed, str) else listed
        if not isinstance(names, list) or not names or not all(name in TYPES for name in names):
            raise SchemaError(schema.path("type"), f"it must be one or some of {', '.join(TYPES)}, not {show(listed)}")
        # Integers are numbers; the library would take the two for alternatives.
        if "number" in names:
            names = [name for name in names if name != "integer"]
        made["type"] = names[0] if len(names) == 1 else list(dict.fromkeys(map(str, names)))

    def _const(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        made["const"] = _literal(schema.keywords["const"], schema.path("const"))

    def _enum(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        values = schema.keywords["enum"]
        if not isinstance(values, list) or not values:
            raise SchemaError(schema.path("enum"), f"it must be a list of values, and not empty; not {show(values)}")
        made["enum"] = [_literal(value, schema.path("enum", at)) for at, value in enumerate(values)]

    def _reference(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        target = self._references.resolve(schema)
        if target.pointer not in self._definitions:
            self._definitions[target.pointer] = str(len(self._definitions))
            self._pending.append(target)
        made["$ref"] = "#/$defs/" + self._definitions[target.pointer]

    def _all_of(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        made["allOf"] = [self._schema(part) for part in schema.listed("allOf")]

    def _any_of(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        made["anyOf"] = [self._schema(branch) for branch in schema.listed("anyOf")]

    def _one_of(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        branches = schema.listed("oneOf")
        beside = {name: value for name, value in schema.keywords.items() if name != "oneOf"}
        # With the keywords beside `oneOf`: they may be what keeps two branches apart.
        whole = [Subschema(branch.path(""), {"allOf": [branch.value, beside]}) for branch in branches]
        for (at, first), (other, second) in itertools.combinations(enumerate(whole), 2):
            if not self._overlap.disjoint(first, second):
                raise SchemaError(
                    schema.path("oneOf"),
                    f"a value might be of branches {at} and {other} at once, which oneOf forbids and no grammar "
                    "enforces: use anyOf, or give the branches a property or type that tells them apart",
                )
        # Not as the schema's own `anyOf`, which it may have besides.
        also.append({"anyOf": [self._schema(branch) for branch in branches]})

    # ── numbers and strings ──────────────────────────────────────────────────────────────────────────────────────────

    def _numbers(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        types = _types_of(schema)
        if "number" in types:
            made.update(number_range(schema))
        elif "integer" in types:
            made.update(integer_range(schema))
        if "multipleOf" in schema.keywords:
            value = number(schema.keywords["multipleOf"])
            if value is None:
                raise SchemaError(schema.path("multipleOf"), f"it must be a number, not {show(value)}")
            made["multipleOf"] = multiple(value, schema.path("multipleOf"))

    def _strings(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        if "string" not in _types_of(schema):
            return
        made.update(sizes(schema, "minLength", "maxLength"))
        also += [{"pattern": pattern} for pattern in _patterns(schema)]
        if "format" in schema.keywords:
            self._format(schema, made, also)

    def _format(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        """Enforce a format, unless the patterns beside it leave no string of it: zod's times have no time zone."""
        name = string(schema, "format")
        known = find_format(name)
        if known.pattern is None and not known.of_library:
            return
        enforced = {"format": name} if known.of_library else {"pattern": f"^(?:{known.pattern})$"}
        beside = [{"pattern": pattern} for part in self._overlap.parts(schema) for pattern in _patterns(part)]
        if beside and not is_string_possible([enforced, *beside]):
            return
        also.append(enforced)
        if known.max_length is not None:
            made["maxLength"] = min(known.max_length, made.get("maxLength", known.max_length))

    # ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrays(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        if "array" not in _types_of(schema):
            return
        made.update(sizes(schema, "minItems", "maxItems"))
        # Before 2020-12 a list of `items` was what `prefixItems` is now.
        if isinstance(schema.keywords.get("items"), list):
            made["prefixItems"] = [self._schema(item) for item in schema.listed("items")]
            made["items"] = self._schema(schema.one("additionalItems"))
        else:
            if "prefixItems" in schema.keywords:
                self._check_draft(schema)
                made["prefixItems"] = [self._schema(item) for item in schema.listed("prefixItems")]
            if "items" in schema.keywords:
                made["items"] = self._schema(schema.one("items"))
        if schema.keywords.get("uniqueItems", False) is not False:
            self._unique_items(schema, made)

    def _check_draft(self, schema: Subschema) -> None:
        draft = self._root.keywords.get("$schema")
        if isinstance(draft, str) and any(old in draft for old in _BEFORE_2020):
            raise SchemaError(
                schema.path("prefixItems"), f"it is no keyword of {draft}: leave $schema out, or use items"
            )

    def _unique_items(self, schema: Subschema, made: Keywords) -> None:
        pointer = schema.path("uniqueItems")
        if schema.keywords["uniqueItems"] is not True:
            raise SchemaError(pointer, f"it must be true or false, not {show(schema.keywords['uniqueItems'])}")
        item = schema.one("items")
        if "prefixItems" in made or self._overlap.types(item) & {"array", "object"}:
            raise SchemaError(
                pointer,
                '"uniqueItems" is enforced only where `items` of the same schema are strings, numbers, booleans '
                "or null",
            )
        values = self._overlap.values(item)
        # Longer arrays would need an item that is used already, and could never end.
        if values is not None:
            made["maxItems"] = min(len(values), made.get("maxItems", len(values)))
        self._unique = True

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _objects(self, schema: Subschema, made: Keywords, also: list[Keywords]) -> None:
        if "object" not in _types_of(schema):
            return
        if "properties" in schema.keywords:
            made["properties"] = {name: self._schema(part) for name, part in schema.named("properties").items()}
        if "required" in schema.keywords:
            made["required"] = list(dict.fromkeys(schema.names("required")))
        made.update(sizes(schema, "minProperties", "maxProperties"))
        patterns = {}
        for pattern, subschema in schema.named("patternProperties").items():
            written = translate_one(pattern, schema.path("patternProperties", pattern))
            if written in patterns:
                raise SchemaError(subschema.pointer, "another pattern matches the same names")
            patterns[written] = self._schema(subschema)
        if patterns:
            made["patternProperties"] = patterns
            self._few_keys = True
        if "additionalProperties" in schema.keywords:
            made["additionalProperties"] = self._schema(schema.one("additionalProperties"))
        if "propertyNames" in schema.keywords:
            self._property_names(schema, also)

    def _property_names(self, schema: Subschema, also: list[Keywords]) -> None:
        """Listed names become properties, a regular expression becomes a pattern; no other names are allowed."""
        names = allowed_names(schema.one("propertyNames"), self._overlap)
        self._open = self._open or not isinstance(names, list)
        if isinstance(names, str):
            self._few_keys = True
            also.append({"patternProperties": {names: True}, "additionalProperties": False})
        elif names is not None:
            also.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})


_Handler = Callable[[_Rewriting, Subschema, Keywords, list[Keywords]], None]
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


def _types_of(schema: Subschema) -> set[str]:
    """The types that a schema itself allows."""
    listed = schema.keywords.get("type", list(TYPES))
    return {str(name) for name in (listed if isinstance(listed, list) else [listed])}


def _patterns(schema: Subschema) -> list[str]:
    """Regular expressions that a schema's own strings must match."""
    if "pattern" not in schema.keywords:
        return []
    return translate(string(schema, "pattern"), schema.path("pattern"))


def _literal(value: Json, pointer: str) -> Any:
    """A constant that the library writes unchanged.

    Raises:
        SchemaError: the library would write another value.
    """
    if isinstance(value, list):
        return [_literal(item, child(pointer, at)) for at, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _literal(item, child(pointer, name)) for name, item in value.items()}
    if isinstance(value, str) and (found := _UNWRITTEN.search(value)):
        raise SchemaError(
            pointer,
            f"a string with {found[0]!r} cannot be written: control characters other than "
            "tabulators, line feeds, form feeds, backspaces and carriage returns are left out",
        )
    exact = number(value)
    return value if exact is None else constant(exact, pointer)
