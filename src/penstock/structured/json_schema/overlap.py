"""Types and values that schemas allow, and whether two schemas exclude each other.

All answers are conservative: types and values may include some that are not allowed, and schemas that exclude each
other in a way that is not checked here count as overlapping.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterator

from penstock.structured.json_schema.document import Json, number
from penstock.structured.json_schema.numbers import Number
from penstock.structured.json_schema.subschema import IN_PLACE, References, Subschema

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
"""JSON's types; integers are numbers."""
MAX_VALUES = 1024
_DEPTH = 12
_COMPARISONS = 20_000

Value = tuple[str, Hashable]
"""A type, and a key that is equal for equal values: 1 and 1.0, objects in any order."""


def value_of(value: Json) -> Value:
    """A key of a JSON value, equal for equal values only."""
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, str):
        return "string", value
    if isinstance(value, list):
        return "array", tuple(map(value_of, value))
    if isinstance(value, dict):
        return "object", frozenset((name, value_of(item)) for name, item in value.items())
    return "number", value


class Overlap:
    """Compares the schemas of one document."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._comparisons = 0

    def types(self, schema: Subschema, depth: int = 0) -> frozenset[str]:
        """The types that a schema allows."""
        if schema.value is False:
            return frozenset()
        types = TYPES
        for part in self.parts(schema):
            types &= _declared_types(part)
            if depth < _DEPTH:
                for keyword in ("anyOf", "oneOf"):
                    if branches := part.listed(keyword):
                        types &= frozenset().union(*(self.types(branch, depth + 1) for branch in branches))
        return types

    def values(self, schema: Subschema, depth: int = 0) -> frozenset[Value] | None:
        """All values that a schema allows, and possibly others; None if they are too many to list."""
        found: frozenset[Value] | None = None
        for part in self.parts(schema):
            for listed in (_declared_values(part), *(self._values_of_branches(part, depth))):
                if listed is not None:
                    found = listed if found is None else found & listed
        types = self.types(schema)
        if found is None:
            found = _values_of_types(types)
        if found is None:
            found = _whole_numbers(list(self.parts(schema)))
        return None if found is None else frozenset(value for value in found if value[0] in types)

    def _values_of_branches(self, schema: Subschema, depth: int) -> "Iterator[frozenset[Value] | None]":
        for keyword in ("anyOf", "oneOf"):
            branches = schema.listed(keyword)
            if branches and depth < _DEPTH:
                each = [self.values(branch, depth + 1) for branch in branches]
                few = [values for values in each if values is not None]
                yield frozenset().union(*few) if len(few) == len(each) else None

    def disjoint(self, first: Subschema, second: Subschema) -> bool:
        """Whether it can be shown that no value satisfies both schemas."""
        self._comparisons = 0
        return self._disjoint(first, second, 0)

    def _disjoint(self, first: Subschema, second: Subschema, depth: int) -> bool:
        self._comparisons += 1
        if depth > _DEPTH or self._comparisons > _COMPARISONS:
            return False
        types = self.types(first) & self.types(second)
        values = self.values(first), self.values(second)
        if not types or (values[0] is not None and values[1] is not None and not values[0] & values[1]):
            return True
        if self._branches_disjoint(first, second, depth) or self._branches_disjoint(second, first, depth):
            return True
        if types == {"number"}:
            return _ranges_disjoint([*self.parts(first), *self.parts(second)])
        return types == {"object"} and self._objects_disjoint(first, second, depth)

    def _branches_disjoint(self, first: Subschema, second: Subschema, depth: int) -> bool:
        """Whether all branches of the first exclude the second."""
        return any(
            all(self._disjoint(branch, second, depth + 1) for branch in branches)
            for part in self.parts(first)
            for keyword in ("anyOf", "oneOf")
            if (branches := part.listed(keyword))
        )

    def _objects_disjoint(self, first: Subschema, second: Subschema, depth: int) -> bool:
        """Whether a property that either requires cannot satisfy both."""
        firsts, seconds = list(self.parts(first)), list(self.parts(second))
        required = {name: None for part in (*firsts, *seconds) for name in part.names("required")}
        return any(
            self._disjoint(_property(first, name), _property(second, name), depth + 1)
            for name in required
            for first in firsts
            for second in seconds
        )

    def parts(self, schema: Subschema, branches: bool = False) -> Iterator[Subschema]:
        """All schemas that a value of `schema` must satisfy; with `branches`, also those that it may satisfy."""
        seen: set[str] = set()
        pending = deque([schema])
        while pending:
            subschema = pending.popleft()
            if subschema.pointer in seen:
                continue
            seen.add(subschema.pointer)
            yield subschema
            for keyword in IN_PLACE if branches else ("allOf",):
                pending += subschema.listed(keyword)
            if "$ref" in subschema.keywords:
                pending.append(self._references.resolve(subschema))


def _property(schema: Subschema, name: str) -> Subschema:
    """A schema's constraints on one property, `patternProperties` aside."""
    properties = schema.named("properties")
    if name in properties:
        return properties[name]
    return (
        schema.one("additionalProperties")
        if "patternProperties" not in schema.keywords
        else Subschema(schema.pointer, True)
    )


def _declared_types(schema: Subschema) -> frozenset[str]:
    if schema.value is False:
        return frozenset()
    listed = schema.keywords.get("type", sorted(TYPES))
    names = [listed] if isinstance(listed, str) else listed
    declared = {"number" if name == "integer" else name for name in names} if isinstance(names, list) else TYPES
    values = _declared_values(schema)
    return TYPES & declared if values is None else TYPES & declared & {kind for kind, _ in values}


def _declared_values(schema: Subschema) -> frozenset[Value] | None:
    found = None
    listed = schema.keywords.get("enum")
    if isinstance(listed, list):
        found = frozenset(map(value_of, listed))
    if "const" in schema.keywords:
        only = frozenset([value_of(schema.keywords["const"])])
        found = only if found is None else found & only
    return found


def _values_of_types(types: frozenset[str]) -> frozenset[Value] | None:
    """All values of these types; None if a type has more than two."""
    few: dict[str, tuple[Value, ...]] = {"null": (("null", None),), "boolean": (("boolean", True), ("boolean", False))}
    return frozenset(value for name in types for value in few[name]) if types <= few.keys() else None


def _whole_numbers(parts: list[Subschema]) -> frozenset[Value] | None:
    if not any(part.keywords.get("type") == "integer" for part in parts):
        return None
    low, high = _range(parts)
    if low is None or high is None or high[0] - low[0] >= MAX_VALUES:
        return None
    return frozenset(("number", number) for number in range(math.ceil(low[0]), math.floor(high[0]) + 1))


Bound = tuple[Number, bool]
"""(limit, whether it is exclusive)."""


def _range(parts: list[Subschema]) -> tuple[Bound | None, Bound | None]:
    lows = [*_bounds(parts, "minimum", False), *_bounds(parts, "exclusiveMinimum", True)]
    highs = [*_bounds(parts, "maximum", False), *_bounds(parts, "exclusiveMaximum", True)]
    return max(lows, default=None), min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)


def _bounds(parts: list[Subschema], keyword: str, excluded: bool) -> Iterator[Bound]:
    for part in parts:
        value = number(part.keywords.get(keyword))
        if value is not None:
            yield value, excluded


def _ranges_disjoint(parts: list[Subschema]) -> bool:
    low, high = _range(parts)
    if low is None or high is None:
        return False
    return low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))
