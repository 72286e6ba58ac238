"""Grammars of Gemma 4's calls (`penstock.parsers.gemma`), whose values are not JSON.

A schema becomes rules of the notation: properties in the schema's order, references as rules of their own. An object
has the properties that its schema names and no others; if it names none, the keys are up to the model. Where calls must
validate, keywords that cannot be enforced are refused by name if the tool is strict; if not, any object is permitted.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api.sampling_params import check_exact
from penstock.api.tools import Function
from penstock.errors import InvalidRequestError
from penstock.parsers.gemma import CLOSE, LONGEST_KEY, OPEN, QUOTE
from penstock.parsers.grammar import Grammar, Mark, schema_rule
from penstock.parsers.tagged import ALL_TYPES, TypesOfProperties, referenced, type_of
from penstock.parsers.tagged_grammar import ANNOTATIONS

_OF_OBJECTS = {"properties", "required", "additionalProperties"}
_OF_ARRAYS = {"items", "minItems", "maxItems"}
_OF_STRINGS = {"minLength", "maxLength"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_BY_TYPE = {"type", *_OF_OBJECTS, *_OF_ARRAYS, *_OF_STRINGS, *_OF_NUMBERS}
_NOT_VALIDATING = {"$defs", "definitions", *ANNOTATIONS}
_LARGEST = 2**16
"""Characters or items of a size that is counted."""
_SHORT = 32
"""Characters of an expression that is repeated rather than made a rule."""
_WITHOUT_QUOTE = r"~/(?s:.*)<\|\"\|>(?s:.*)/"


def _item(name: str, arguments: str, mark: Mark) -> str:
    return f'"call:{name}" {arguments}'


def _call(opening: str, items: str, mark: Mark, many: bool) -> str:
    return f"{opening} {items} {mark(CLOSE)}"


def _documents(functions: Sequence[Function], mark: Mark) -> Sequence[str]:
    return ()


def _arguments(function: Function, index: int, valid: bool, mark: Mark) -> list[str]:
    if valid:
        try:
            return _Rules(function, index, mark).arguments()
        except InvalidRequestError:
            if function.strict:
                raise
    return [f"arguments_{index}: any_object", *_anything(mark)]


class _Rules:
    """The rules of one function's arguments."""

    def __init__(self, function: Function, index: int, mark: Mark) -> None:
        self._function = function
        self._index = index
        self._types_within = TypesOfProperties(function.schema)
        self._mark = mark
        self._rules: list[str] = []
        self._numbers = itertools.count()
        self._referenced: dict[str, str] = {}
        """The rule of each `$ref`."""

    def arguments(self) -> list[str]:
        """
        Raises:
            InvalidRequestError: a keyword of the schema cannot be enforced, or is malformed.
        """
        check_exact(self._function.schema, "tools", self._function.name)
        schema = {keyword: value for keyword, value in self._function.schema.items() if keyword != "$id"}
        try:
            value = self._value(schema, "the arguments")
        except RecursionError:
            raise InvalidRequestError(f"the tool {self._function.name} is nested too deeply", "tools") from None
        return [f"arguments_{self._index}: {value}", *self._rules, *_anything(self._mark)]

    def _rule(self, definition: str) -> str:
        """The name of a rule."""
        name = f"r{self._index}_{next(self._numbers)}"
        self._rules.append(f"{name}: {definition}")
        return name

    def _part(self, schema: object, where: str) -> str:
        """A value within another: a short expression, as it may be repeated there."""
        value = self._value(schema, where)
        return value if len(value) <= _SHORT else self._rule(value)

    def _value(self, schema: object, where: str) -> str:
        """A value, as an expression of rules."""
        if schema is True:
            return "any_value"
        if not isinstance(schema, Mapping):
            raise self._unenforceable(json.dumps(schema), where)
        keywords = schema.keys() - _NOT_VALIDATING
        if not keywords:
            return "any_value"
        for word in ("$ref", "anyOf", "oneOf"):
            if word in keywords:
                redundant = {"type"} if self._implies_type(word, schema, where) else set()
                self._refuse(keywords - {word} - redundant, where)
                other = schema[word]
                return self._reference(other, where) if word == "$ref" else self._alternatives(word, other, where)
        if "enum" in keywords or "const" in keywords:
            self._refuse(keywords - {"type", "enum", "const"}, where)
            return self._constants(schema, where)
        self._refuse(keywords - _BY_TYPE, where)
        return _either([self._of_type(name, schema, where) for name in self._types(schema, where)])

    def _implies_type(self, word: str, schema: Mapping[str, Any], where: str) -> bool:
        """Whether all values allowed by a keyword have types that the schema allows, so that `type` adds nothing."""
        return self._types_within.of_value({word: schema[word]}).issubset(self._types(schema, where))

    def _reference(self, pointer: object, where: str) -> str:
        if not isinstance(pointer, str) or (target := referenced(pointer, self._function.schema)) is None:
            raise self._unenforceable("$ref", where)
        if pointer not in self._referenced:
            name = self._referenced[pointer] = f"r{self._index}_{next(self._numbers)}"
            self._rules.append(f"{name}: {self._value(target, where)}")
        return self._referenced[pointer]

    def _alternatives(self, word: str, schemas: object, where: str) -> str:
        """The values of `anyOf`, or of `oneOf` where no value can be of two alternatives."""
        if not isinstance(schemas, list) or not schemas:
            raise self._malformed(word, where, "a list of schemas")
        if word == "oneOf" and self._share_types(schemas):
            raise self._unenforceable(word, where)
        return _either([self._value(schema, where) for schema in schemas])

    def _share_types(self, schemas: Sequence[object]) -> bool:
        types = [self._types_within.of_value(schema) for schema in schemas]
        types = [names | {"integer"} if "number" in names else names for names in types]
        return any(first & second for first, second in itertools.combinations(types, 2))

    def _constants(self, schema: Mapping[str, Any], where: str) -> str:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not isinstance(values, list):
            raise self._malformed("enum", where, "a list")
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        allowed = set(self._types(schema, where))
        values = [value for value in values if type_of(value) & allowed]
        if not values:
            raise self._unenforceable("enum" if "enum" in schema else "const", where)
        return _either([self._constant(value, where) for value in values])

    def _constant(self, value: object, where: str) -> str:
        if isinstance(value, str):
            if QUOTE in value:
                raise self._unenforceable(QUOTE, where)
            return f"{self._mark(QUOTE)} {_quoted(value)} {self._mark(QUOTE)}"
        if isinstance(value, list):
            return _joined("[", [self._constant(item, where) for item in value], "]")
        if isinstance(value, Mapping):
            pairs = [f"{self._key(key, where)} {self._constant(item, where)}" for key, item in value.items()]
            return _joined("{", pairs, "}")
        return _quoted(json.dumps(value))

    def _types(self, schema: Mapping[str, Any], where: str) -> Sequence[str]:
        given = schema.get("type", sorted(ALL_TYPES))
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not names or not ALL_TYPES.issuperset(map(str, names)):
            raise self._malformed("type", where, "a type or several")
        return [name for name in names if name != "integer" or "number" not in names]

    def _of_type(self, name: str, schema: Mapping[str, Any], where: str) -> str:
        if name == "object":
            return self._object(schema, where)
        if name == "array":
            return self._array(schema, where)
        if name == "string":
            rule, rules = _text(*self._sizes(schema, "minLength", "maxLength", where), self._mark)
            self._rules += rules
            return rule
        if name == "boolean":
            return '("true" | "false")'
        return '"null"' if name == "null" else self._number(name, schema, where)

    def _number(self, name: str, schema: Mapping[str, Any], where: str) -> str:
        """A number or an integer, which is JSON."""
        for keyword in _OF_NUMBERS & schema.keys():
            if isinstance(schema[keyword], bool) or not isinstance(schema[keyword], int | float):
                raise self._malformed(keyword, where, "a number")
        bounds = {keyword: schema[keyword] for keyword in schema if keyword in _OF_NUMBERS}
        return self._rule(schema_rule(self._function, {"type": name, **bounds}))

    def _array(self, schema: Mapping[str, Any], where: str) -> str:
        item = self._part(schema.get("items", True), f"the items of {where}")
        least, most = self._sizes(schema, "minItems", "maxItems", where)
        if most == 0:
            return '"[" "]"'
        further = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" ({item} {further}){"" if least else "?"} "]"'

    def _sizes(self, schema: Mapping[str, Any], least: str, most: str, where: str) -> tuple[int, int | None]:
        """The least and the greatest size by these keywords."""
        for keyword in (least, most):
            size = schema.get(keyword, 0)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise self._malformed(keyword, where, "a whole number")
            if size > _LARGEST:
                raise self._unenforceable(keyword, where)
        if most in schema and schema.get(least, 0) > schema[most]:
            raise self._unenforceable(most, where)
        return schema.get(least, 0), schema.get(most)

    def _object(self, schema: Mapping[str, Any], where: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise self._malformed("properties", where, "an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._malformed("required", where, "a list of names")
        needed = frozenset(required)
        if not properties.keys() >= needed:
            raise self._unenforceable("required", f"a name that is no property of {where}")
        if not properties:
            return self._map(schema.get("additionalProperties", True), where)
        pairs = [
            (f"{self._key(key, where)} {self._part(value, f'{key} of {where}')}", key in needed)
            for key, value in properties.items()
        ]
        return f'"{{" {self._pairs(pairs)} "}}"'

    def _map(self, additional: object, where: str) -> str:
        """An object with keys of the model's choice."""
        if additional is False:
            return '"{" "}"'
        pair = f'ANY_KEY ":" {self._part(additional, f"the properties of {where}")}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _pairs(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Pairs in their order with commas between them; those that are not required may be absent."""
        alone = [pair for pair, _ in pairs]
        after = [f'("," {pair})' if required else f'("," {pair})?' for pair, required in pairs]
        optional = next((place for place, (_, required) in enumerate(pairs) if required), len(pairs))
        if optional == len(pairs):
            begun, rest = '""', '""'
        else:
            begun, rest = " ".join([alone[optional], *after[optional + 1 :]]), " ".join(after[optional:])
        for place in reversed(range(optional)):  # any of these may be the first that is there
            rest = self._rule(rest)
            begun = f"{alone[place]} {rest} | {begun}"
            rest = f"{after[place]} {rest}"
        return f"({begun})"

    def _key(self, key: str, where: str) -> str:
        """A key and its colon."""
        unreadable = ":" in key or QUOTE in key or key.startswith("}") or key != key.strip()
        if unreadable or len(key) > LONGEST_KEY:
            raise self._unenforceable(key, where)
        return _quoted(f"{key}:")

    def _refuse(self, keywords: set[str], where: str) -> None:
        for keyword in sorted(keywords):
            raise self._unenforceable(keyword, where)

    def _malformed(self, keyword: str, where: str, expected: str) -> InvalidRequestError:
        words = f"{where} of {self._function.name}: {keyword} of the schema must be {expected}"
        return InvalidRequestError(words, "tools")

    def _unenforceable(self, keyword: str, where: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"tools: {keyword!r} ({where} of {self._function.name}) cannot be enforced in this model's notation of "
            "calls: leave it out, or let the tool not be strict",
            "tools",
        )


def _anything(mark: Mark) -> list[str]:
    """The rules of values that are up to the model."""
    text, rules = _text(0, None, mark)
    return [
        'any_object: "{" (any_pair ("," any_pair)*)? "}"',
        'any_pair: ANY_KEY ":" any_value',
        'any_array: "[" (any_value ("," any_value)*)? "]"',
        f"any_value: any_object | any_array | {text} | any_scalar",
        'any_scalar: %json {"type": ["number", "boolean", "null"]}',
        r'ANY_KEY: /[^\s:,{}\[\]<>"]{1,64}/',
        *rules,
    ]


def _text(least: int, most: int | None, mark: Mark) -> tuple[str, list[str]]:
    """The rule of a string of so many characters between its marks; its name first."""
    name, quote = f"text_{least}_{'' if most is None else most}", mark(QUOTE)
    content = f"/(?s:.){{{least},{'' if most is None else most}}}/ & {_WITHOUT_QUOTE}"
    if quote.startswith("<"):
        return name, [f"{name}: {quote} {name.upper()} {quote}", f"{name.upper()}: {content}"]
    return name, [f"{name}: {quote} {name.upper()}", f"{name.upper()}: ({content}) {quote}"]


def _either(alternatives: Sequence[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _joined(begin: str, parts: Sequence[str], end: str) -> str:
    return " ".join([f'"{begin}"', ' "," '.join(parts), f'"{end}"'])


def _quoted(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


GRAMMAR = Grammar(OPEN, _item, _call, between="", documents=_documents, arguments=_arguments)
