"""The property names that `propertyNames` allows."""

from penstock.structured.json_schema.document import SchemaError, show
from penstock.structured.json_schema.formats import find_format
from penstock.structured.json_schema.overlap import Overlap
from penstock.structured.json_schema.patterns import translate
from penstock.structured.json_schema.sizes import sizes, string
from penstock.structured.json_schema.subschema import Subschema

_HARD = ("anyOf", "oneOf")


def allowed_names(rule: Subschema, overlap: Overlap) -> list[str] | str | None:
    """All allowed names, or a regular expression for them; None if any name is allowed.

    Raises:
        SchemaError: neither a list nor a regular expression can name them.
    """
    parts = list(overlap.parts(rule, branches=True))
    values = overlap.values(rule)
    for part in parts:
        part.check_keywords()
        if values is None and any(keyword in part.keywords for keyword in _HARD):
            raise SchemaError(
                part.pointer, f'"propertyNames" with one of {show(list(_HARD))} is not enforced: use enum'
            )
    patterns = [pattern for part in parts for pattern in _patterns(part)]
    if len(patterns) > 1 or (patterns and values is not None):
        raise SchemaError(rule.pointer, '"propertyNames" may have only one of enum, pattern, format and lengths')
    if "string" not in overlap.types(rule):
        return []
    if values is not None:
        listed = [name for part in parts for name in _listed(part)]
        return [name for name in dict.fromkeys(listed) if ("string", name) in values]
    return patterns[0] if patterns else None


def _listed(schema: Subschema) -> list[str]:
    listed = schema.keywords.get("enum", [])
    values = [*(listed if isinstance(listed, list) else []), schema.keywords.get("const")]
    return [value for value in values if isinstance(value, str)]


def _patterns(schema: Subschema) -> list[str]:
    """Regular expressions; each must match somewhere in a property name. A format beside a pattern has no effect."""
    patterns = []
    lengths = sizes(schema, "minLength", "maxLength")
    if "format" in schema.keywords and "pattern" not in schema.keywords:
        name = string(schema, "format")
        known = find_format(name)
        if known.of_library:
            raise SchemaError(schema.path("format"), f"names of the format {show(name)} are not enforced")
        if known.pattern is not None:
            patterns.append(f"^(?:{known.pattern})$")
        if known.max_length is not None:
            lengths["maxLength"] = min(known.max_length, lengths.get("maxLength", known.max_length))
    if "pattern" in schema.keywords:
        patterns += translate(string(schema, "pattern"), schema.path("pattern"))
    if lengths:
        most = lengths.get("maxLength", "")
        patterns.append(f"^[\\x{{0}}-\\x{{10ffff}}]{{{lengths.get('minLength', 0)},{most}}}$")
    return patterns
