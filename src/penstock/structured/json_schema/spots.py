"""Locates the arrays of a document whose items must be unique (`uniqueItems`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from decimal import Decimal

from penstock.dataclass import dataclass
from penstock.structured.json_schema.overlap import Overlap, Value
from penstock.structured.json_schema.subschema import IN_PLACE, References, Subschema

ANYTHING = "anything"
"""Stands for the pointer to a schema without constraints; pointers are empty or begin with a slash."""


@dataclass(frozen=True, slots=True)
class PartConstraints:
    """A schema's constraints on a value's parts. Schemas are identified by JSON pointers."""

    unique: bool = False
    """Whether the items of an array must be unique."""
    values: tuple[bytes, ...] | None = None
    """All values that its items may have, as the library writes them; None if they are too many."""
    also: tuple[str, ...] = ()
    """Schemas that also apply, or may apply, to the value itself."""
    properties: Mapping[str, str] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    """Schemas of properties whose names match a pattern."""
    additional: str = ANYTHING
    """Schema of all other properties."""
    prefix: tuple[str, ...] = ()
    items_after: str = ANYTHING


def spots_of(root: Subschema, references: References, overlap: Overlap) -> dict[str, PartConstraints]:
    """The constraints of each schema within `root`, by its JSON pointer; that of `root` is empty.

    Raises:
        SchemaError: a value in it is not a schema.
    """
    spots = {ANYTHING: PartConstraints()}
    pending = [root]
    while pending:
        schema = pending.pop()
        if schema.pointer not in spots:
            spots[schema.pointer], below = _spot(schema, references, overlap)
            pending += below
    return spots


def _spot(schema: Subschema, references: References, overlap: Overlap) -> tuple[PartConstraints, list[Subschema]]:
    """The constraints of a schema, and the schemas within it."""
    if not schema.keywords:
        return PartConstraints(), []
    also = [part for keyword in IN_PLACE for part in schema.listed(keyword)]
    if "$ref" in schema.keywords:
        also.append(references.resolve(schema))
    properties = schema.named("properties")
    patterns = [*schema.named("patternProperties").values()]
    additional = schema.one("additionalProperties")
    fixed = isinstance(schema.keywords.get("items"), list)  # before draft 2020-12
    prefix = schema.listed("items" if fixed else "prefixItems")
    item = schema.one("additionalItems" if fixed else "items")
    unique = schema.keywords.get("uniqueItems") is True
    spot = PartConstraints(
        unique=unique,
        values=_written(overlap.values(item)) if unique else None,
        also=_pointers(also),
        properties={name: subschema.pointer for name, subschema in properties.items()},
        patterns=_pointers(patterns),
        additional=additional.pointer,
        prefix=_pointers(prefix),
        items_after=item.pointer,
    )
    return spot, [*also, *properties.values(), *patterns, additional, *prefix, item]


def _pointers(schemas: list[Subschema]) -> tuple[str, ...]:
    return tuple(schema.pointer for schema in schemas)


def _written(values: frozenset[Value] | None) -> tuple[bytes, ...] | None:
    """Scalars as the library writes them."""
    return None if values is None else tuple(sorted(_text(value).encode() for _, value in values))


def _text(value: object) -> str:
    if isinstance(value, Decimal):
        return format(value, "f")
    return json.dumps(value, ensure_ascii=False)


def joined(
    forms: Sequence[Mapping[str, PartConstraints]], calls: Sequence[Mapping[str, PartConstraints]], key: str
) -> dict[str, PartConstraints]:
    """The constraints on a document that may satisfy any of several schemas; empty if none of them has any.

    Args:
        forms: constraints of schemas of the whole document.
        calls: constraints of schemas of the arguments of calls.
        key: the property of the document, or of each item if it is a list, that has the arguments; empty: they are the
            document.
    """
    made = {ANYTHING: PartConstraints()}
    roots: list[str] = []
    for number, spots in enumerate([*forms, *calls]):
        made |= {_numbered(number, pointer): _renamed(number, spot) for pointer, spot in spots.items()}
        roots.append(_numbered(number, "") if spots else "")
    of_forms = tuple(filter(None, roots[: len(forms)]))
    of_calls = tuple(filter(None, roots[len(forms) :]))
    if not of_forms and not of_calls:
        return {}
    if not key:
        return {**made, "": PartConstraints(also=of_forms + of_calls)}
    return {
        **made,
        "": PartConstraints(also=("call", *of_forms)),
        "call": PartConstraints(properties={key: "arguments"}, items_after="call"),
        "arguments": PartConstraints(also=of_calls),
    }


def _numbered(number: int, pointer: str) -> str:
    return pointer if pointer == ANYTHING else f"{number}{pointer}"


def _renamed(number: int, spot: PartConstraints) -> PartConstraints:
    return replace(
        spot,
        also=tuple(_numbered(number, pointer) for pointer in spot.also),
        properties={name: _numbered(number, pointer) for name, pointer in spot.properties.items()},
        patterns=tuple(_numbered(number, pointer) for pointer in spot.patterns),
        additional=_numbered(number, spot.additional),
        prefix=tuple(_numbered(number, pointer) for pointer in spot.prefix),
        items_after=_numbered(number, spot.items_after),
    )
