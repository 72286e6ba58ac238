"""The schemas within a JSON schema, found by keyword."""

from collections.abc import Callable, Mapping
from typing import Any

_SCHEMAS = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"),
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    }
)
"""Keywords whose value is a schema, or a list of schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has schemas by name."""
_NULLABLE = frozenset({"const", "default"})


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """A copy in which `change` was applied to each schema that is an object, to the innermost first.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if not isinstance(schema, Mapping):
        return schema
    return change({keyword: _changed(keyword, value, change) for keyword, value in schema.items()})


def _changed(keyword: str, value: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    if keyword in _SCHEMAS:
        return (
            [map_schemas(schema, change) for schema in value] if isinstance(value, list) else map_schemas(value, change)
        )
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: map_schemas({} if schema is None else schema, change) for name, schema in value.items()}
    return value


def without_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a schema whose value is not null, which stands for a keyword that was left out."""
    return {keyword: value for keyword, value in schema.items() if value is not None or keyword in _NULLABLE}
