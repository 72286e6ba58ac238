"""Grammars of calls with arguments between tags (`penstock.parsers.tagged`).

Strings are plain text, up to their closing tag; all else is JSON. Of a schema for all
arguments, `properties` and `required` are enforced; of one for a string, `enum`, `const` and the length. Other keywords
of a strict tool are refused by name; those of another leave the arguments, or the one value, free.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.api.tools import Function
from penstock.errors import InvalidRequestError
from penstock.parsers.grammar import Grammar, Mark, schema_rule
from penstock.parsers.tagged import ALL_TYPES, CLOSE, DEPTH, OPEN, Tags, TypesOfProperties, referenced
from penstock.parsers.tagged import GLM as GLM_TAGS
from penstock.parsers.tagged import QWEN as QWEN_TAGS

ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$schema",
    "$comment",
}
_OF_ARGUMENTS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$id"),
    *ANNOTATIONS,
}
_OF_STRINGS = {"type", "enum", "const", "minLength", "maxLength", *ANNOTATIONS}
_LONGEST = 2**16
"""Maximum length that the grammar counts."""


def grammar(tags: Tags) -> Grammar:
    """The grammar of calls in this format."""

    def item(name: str, arguments: str, mark: Mark) -> str:
        opened, ended = json.dumps(f"{tags.before_name}{name}{tags.after_name}\n"), json.dumps(tags.end)
        return f"{opened} {arguments}{f' {ended}' if tags.end else ''}"

    def call(opening: str, items: str, mark: Mark, many: bool) -> str:
        after, before = ('"\\n"', ' "\\n"') if tags.own_lines else ("", "")
        return f"{opening} {after} {items}{before} {mark(CLOSE)}"

    return Grammar(
        opening=OPEN, item=item, call=call, between='"\\n"', documents=_documents(tags), arguments=_arguments(tags)
    )


def _documents(tags: Tags) -> Callable[[Sequence[Function], Mark], Sequence[str]]:
    """`Grammar.documents` of tagged formats: JSON follows the keys of values that are not strings."""

    def marks(functions: Sequence[Function], mark: Mark) -> Sequence[str]:
        return tuple(dict.fromkeys(mark(_key(tags, key)) for function in functions for key in _json_keys(function)))

    return marks


def _json_keys(function: Function) -> Iterator[str]:
    """The keys of arguments that may be JSON, for schemas that can be enforced."""
    properties = function.schema.get("properties")
    if isinstance(properties, Mapping) and function.schema.keys() <= _OF_ARGUMENTS:
        types = TypesOfProperties(function.schema)
        yield from (key for key in properties if types.of(key) != {"string"})


def _key(tags: Tags, key: str) -> str:
    """The rule of the text before a value."""
    lines = "\n" if tags.own_lines or tags.before_value else ""
    return f"{tags.before_key}{key}{tags.after_key}{lines}{tags.before_value}"


def _arguments(tags: Tags) -> "Callable[[Function, int, bool, Mark], list[str]]":
    # The line break after the tag is a lexeme of its own: at the tag a text ends, as the parser reads it.
    end = json.dumps(("\n" if tags.own_lines else "") + tags.after_value)

    def rules(function: Function, index: int, valid: bool, mark: Mark) -> list[str]:
        schema = function.schema
        if not valid:
            key = rf'"{tags.before_key}" /[^<>\n]{{1,64}}/ {json.dumps(_key(tags, "").removeprefix(tags.before_key))}'
            return [f'arguments_{index}: (any_argument "\\n")*', f"any_argument[lazy]: {key} /(?s:.*)/ {end}"]
        properties, required = _permitted(function)
        made, parts = [], []
        types = TypesOfProperties(schema)
        for number, key in enumerate(properties):
            name = f"value_{index}_{number}"
            optional = "" if key in required else "?"
            parts.append(f'({json.dumps(_key(tags, key))} {name} "\\n"){optional}')
            try:
                made += _value(name, function, key, types.of(key), end)
            except InvalidRequestError:
                if function.strict:
                    raise
                made.append(_any_value(name, end))
        return [f"arguments_{index}: {' '.join(parts) or chr(34) * 2}", *made]

    return rules


def _permitted(function: Function) -> tuple[list[str], frozenset[str]]:
    """The allowed and the required keys of the arguments.

    Raises:
        InvalidRequestError: another keyword constrains the arguments, or one is malformed; `param` is "tools".
    """
    schema = function.schema
    _refuse(schema, _OF_ARGUMENTS, f"the arguments of {function.name}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise _malformed("properties", function.name, "an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _malformed("required", function.name, "a list of names")
    keys = [key for key, value in properties.items() if not _is_never(value)]
    for missing in frozenset(required).difference(keys):
        raise _unenforceable("required", f"{function.name}: {missing!r} is none of its properties, or has no value")
    return keys, frozenset(required)


def _is_never(schema: object) -> bool:
    """Whether a schema allows no value."""
    excluded = schema.get("not") if isinstance(schema, Mapping) else None
    return schema is False or excluded == {} or excluded is True


def _malformed(keyword: str, where: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {keyword} of its schema must be {expected}", "tools")


def _any_value(name: str, end: str) -> str:
    return f"{name}[lazy]: /(?s:.*)/ {end}"


def _value(name: str, function: Function, key: str, types: frozenset[str], end: str) -> list[str]:
    """The rule of a value of these types up to the end of its tag.

    Raises:
        InvalidRequestError: it cannot be enforced; `param` is "tools".
    """
    schema = function.schema["properties"][key]
    if not isinstance(schema, (Mapping, bool)):
        raise _malformed(f"properties/{key}", function.name, "a schema")
    if "string" not in types:
        whole = _with_definitions(schema, function.schema)
        return [f"{name}: {name}_json {end}", f"{name}_json: {schema_rule(function, whole)}"]
    schema = _resolved(schema, function.schema)
    where = f"{key} of {function.name}"
    if types == ALL_TYPES and isinstance(schema, Mapping):
        _refuse(schema, ANNOTATIONS, where)
    if types != {"string"} or not isinstance(schema, Mapping):
        if isinstance(schema, Mapping):
            _refuse_mixed(schema, where)
        return [_any_value(name, end)]
    _refuse(schema, _OF_STRINGS, where)
    for keyword, kind, expected in (
        ("enum", list, "a list"),
        ("minLength", int, "a whole number"),
        ("maxLength", int, "a whole number"),
    ):
        if keyword in schema and not isinstance(schema[keyword], kind):
            raise _malformed(keyword, where, expected)
    words = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if words is not None:
        words = [word for word in words if isinstance(word, str)]
        return [f"{name}: ({' | '.join(json.dumps(word, ensure_ascii=False) for word in words)}) {end}"]
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if max(least, most or 0) > _LONGEST:
        raise _unenforceable("maxLength" if most else "minLength", where)
    count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
    return [f"{name}[lazy]: /(?s:.){count}/ {end}"]


def _resolved(schema: object, root: Mapping[str, Any]) -> object:
    """The schema with its reference resolved, if there is a target."""
    for _ in range(DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target = referenced(schema["$ref"], root)
        if target is None:
            break
        beside = {word: said for word, said in schema.items() if word != "$ref"}
        schema = {**target, **beside} if isinstance(target, Mapping) else beside
    return schema


def _refuse_mixed(schema: Mapping[str, Any], where: str) -> None:
    """Refuse keywords other than alternatives by type for a value that may be a string or something else."""
    for word in ("anyOf", "oneOf"):
        for alternative in schema.get(word, ()):
            _refuse(alternative, {"type", *ANNOTATIONS}, where)
    _refuse(schema, {"type", "anyOf", "oneOf", *ANNOTATIONS}, where)


def _with_definitions(schema: object, root: Mapping[str, Any]) -> object:
    """A property's schema with the definitions of the whole schema."""
    shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return {**schema, **shared} if isinstance(schema, Mapping) else schema


def _refuse(schema: object, known: set[str], where: str) -> None:
    for keyword in schema if isinstance(schema, Mapping) else ():
        if keyword not in known:
            raise _unenforceable(keyword, where)


def _unenforceable(keyword: str, where: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tools: {keyword!r} ({where}) cannot be enforced in this model's calls, whose strings are plain text between "
        "tags: leave it out, or let the calls be neither strict nor forced",
        "tools",
    )


QWEN = grammar(QWEN_TAGS)
GLM = grammar(GLM_TAGS)
