"""Random JSON schemas, each satisfiable and of bounded size, and what holds their answers to them."""

import json
from random import Random
from typing import Any

from jsonschema import Draft202012Validator

WORDS = ["id", "name", "tags", "size", "größe", 'quo"te', "a b", "x/y", "ok", "items"]
LEAVES: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3, None, "ü"]},
    {"const": {"a": [1, "x"]}},
    {"type": "string", "pattern": "^[A-F]{2}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": ["integer", "null"], "minimum": -20, "maximum": 20},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    {"type": "number", "multipleOf": 0.25, "exclusiveMinimum": 0, "maximum": 2.5},  # else digits without end
]
ENDLESS = {"type": "object", "properties": {f"p{i}": {"multipleOf": 16_001 + 10 * i} for i in range(38)}}
"""Compiling this takes longer than a grammar may."""


def slow_schema(seed: int, parts: int = 3) -> dict[str, Any]:
    """A schema that takes some tenths of a second to compile, another for each seed."""
    return {"type": "object", "properties": {f"{seed}-{i}": {"multipleOf": 16_001 + 10 * i} for i in range(parts)}}


def random_schema(seed: int) -> dict[str, Any]:
    """A schema whose documents are short."""
    dice = Random(seed)
    schema = _object(dice, 2) if dice.random() < 0.8 else _array(dice, 2)
    if dice.random() < 0.3:
        schema = {"$ref": "#/$defs/top", "$defs": {"top": schema}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _value(dice: Random, depth: int) -> dict[str, Any]:
    kind = dice.random()
    if depth and kind < 0.2:
        return _object(dice, depth - 1)
    if depth and kind < 0.35:
        return _array(dice, depth - 1)
    if depth and kind < 0.45:
        return {"anyOf": [_value(dice, depth - 1), {"type": "null"}]}
    if kind < 0.65:
        least = dice.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 6)}
    return dice.choice(LEAVES)


def _object(dice: Random, depth: int) -> dict[str, Any]:
    names = dice.sample(WORDS, dice.randint(1, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _value(dice, depth) for name in names}}
    schema["required"] = [name for name in names if dice.random() < 0.7]
    schema["additionalProperties"] = False
    return schema


def _array(dice: Random, depth: int) -> dict[str, Any]:
    if dice.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [_value(dice, depth), {"type": "boolean"}],
            "minItems": 2,
            "items": False,
        }
    return {"type": "array", "items": _value(dice, depth), "minItems": dice.randint(0, 2), "maxItems": 3}


def check_document(text: str, schema: dict[str, Any]) -> None:
    """Assert that a text is a document of the schema."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(text))
