"""Support for each feature of JSON Schema: the table in docs/structured.md, each row of which is a test case."""

from dataclasses import dataclass
from typing import Any

BIG = 175928847299117063
_PET = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        "Cat": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["kind"],
        },
        "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
    },
}


@dataclass(frozen=True)
class Feature:
    """A row: refused with an error that contains `refused`, or accepted if that is empty."""

    name: str
    note: str
    schema: Any
    good: tuple[str, ...] = ()
    """Answers, as JSON text."""
    bad: tuple[str, ...] = ()
    refused: str = ""
    effect: str = "enforced"

    @property
    def row(self) -> str:
        return f"| {self.name} | {'refused' if self.refused else self.effect} | {self.note} |"


def enforced(name: str, note: str, schema: Any, good: list[str], bad: list[str]) -> Feature:
    return Feature(name, note, schema, tuple(good), tuple(bad))


def ignored(name: str, note: str, schema: Any, good: list[str], bad: list[str]) -> Feature:
    return Feature(name, note, schema, tuple(good), tuple(bad), effect="no effect")


def refused(name: str, note: str, schema: Any, words: str) -> Feature:
    return Feature(name, note, schema, refused=words)


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def obj(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


def array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", **keywords}


FEATURES = [
    enforced("`type`", "one or several", {"type": ["integer", "null"]}, ["1", "null"], ['"a"', "1.5"]),
    enforced(
        "`const`, `enum`",
        "numbers that a double represents exactly",
        {"enum": [1, "a", 2.5]},
        ["1", '"a"', "2.5"],
        ["2"],
    ),
    refused("`const`, `enum` of other numbers", "", {"const": BIG}, f"the number {BIG} would not"),
    enforced(
        "bounds of integers",
        "up to 63 bits; a bound that no double represents becomes the next double inside the range",
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["-5", str(2**62)],
        [str(2**63), "1.0"],
    ),
    refused(
        "bounds without a double between them",
        "",
        {"type": "integer", "minimum": BIG, "maximum": BIG},
        "no double (53 bits",
    ),
    enforced(
        "bounds of numbers",
        "likewise; numbers are then written without exponents",
        {"type": "number", "exclusiveMinimum": 0.5, "maximum": 9.75},
        ["0.75", "9.75"],
        ["0.5", "9.76"],
    ),
    enforced("`multipleOf`", "", {"type": "number", "multipleOf": 0.07}, ["0.14"], ["0.1"]),
    refused(
        "`multipleOf` of large numbers",
        "above 16,384, without the factors 2 and 5: 3,000,000 is enforced",
        {"type": "integer", "multipleOf": 1234567},
        "take too long to compile",
    ),
    enforced("`minLength`, `maxLength`", "", string(minLength=2, maxLength=3), ['"ab"', '"日本語"'], ['"a"', '"abcd"']),
    enforced("`pattern`", "syntax of ECMA-262", string(pattern=r"^[[:a]\d+$"), ['":1"', '"[12"'], ['"b1"']),
    enforced(
        "look-ahead at the beginning of a `pattern`",
        "`^(?=X)Y`, also several",
        string(pattern=r"^(?=.*[A-Z])(?=[^\d]*\d).{2,3}$"),
        ['"A1"', '"1bA"'],
        ['"a1"', '"AA"', '"A1bc"'],
    ),
    enforced(
        "look-ahead of zod and pydantic",
        "emails before zod 4.6, durations, IBANs; `Decimal`",
        string(pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"),
        ['"-1.5"'],
        ['"-."', '""'],
    ),
    refused("other look-around, `\\b`, backreferences, flags", "", string(pattern="a(?=b)"), "look-around"),
    enforced("`format`: `date`", "years 1 to 9999", string(format="date"), ['"2024-02-29"'], ['"2023-02-29"']),
    enforced("`time`", "no leap seconds", string(format="time"), ['"12:00:59Z"'], ['"12:00:60Z"', '"12:00:00"']),
    enforced(
        "`date-time`", "", string(format="date-time"), ['"2024-02-29T01:02:03+01:00"'], ['"2023-02-29T01:02:03Z"']
    ),
    enforced(
        "`hostname`", "at most 253 characters", string(format="hostname"), ['"a.example"'], ['"-a"', f'"{"a." * 127}a"']
    ),
    enforced(
        "`email`, `ipv4`, `ipv6`, `uuid`, `uri`, `duration`, `json-pointer`",
        "also `relative-json-pointer`, `uuid1` to `uuid8`, `ipvanyaddress`, `base64`, `base64url`",
        string(format="ipv4"),
        ['"127.0.0.1"'],
        ['"1.2.3"', '"256.1.1.1"'],
    ),
    enforced(
        "a format beside `pattern`",
        "both, if a string can have both; otherwise the pattern",
        string(format="time", pattern=r"^[0-2]\d:[0-5]\d$"),
        ['"12:00"'],
        ['"12:00:00Z"'],
    ),
    ignored("other formats", "annotations: `password`, `int32`, `nanoid`", string(format="regex"), ['"("'], ["1"]),
    enforced(
        "`properties`, `required`",
        "in the order of the schema",
        obj(properties={"a": {"type": "integer"}}, required=["a"], additionalProperties=False),
        ['{"a": 1}'],
        ["{}", '{"b": 1}'],
    ),
    enforced(
        "`additionalProperties`, `patternProperties`",
        "no key comes twice, however it is spelled; patterns must not overlap",
        obj(properties={"a": {"type": "boolean"}}, additionalProperties={"type": "integer"}),
        ['{"a": true, "b": 1}'],
        ['{"a": true, "\\u0061": 1}', '{"b": 1, "b": 2}', '{"b": true}'],
    ),
    enforced(
        "`minProperties`, `maxProperties`",
        "if all of `properties` are required",
        obj(minProperties=2, maxProperties=2, additionalProperties={"type": "boolean"}),
        ['{"a": true, "b": true}'],
        ['{"a": true, "a": true}', '{"a": true}'],
    ),
    enforced(
        "`propertyNames`",
        "one of: enum, pattern, format, lengths; a format beside a pattern has no effect",
        obj(propertyNames={"enum": ["a", "b"]}, additionalProperties={"type": "integer"}),
        ['{"a": 1}', '{"a": 1, "b": 2}'],
        ['{"c": 1}'],
    ),
    enforced("`items`, `prefixItems`", "", array(prefixItems=[{"const": 1}], items={"const": 2}), ["[1, 2]"], ["[2]"]),
    enforced(
        "`minItems`, `maxItems`", "", array(items={"const": 1}, minItems=1, maxItems=2), ["[1]"], ["[]", "[1, 1, 1]"]
    ),
    enforced(
        "`uniqueItems`",
        "of strings, numbers, booleans and null",
        array(items={"type": ["string", "number"]}, uniqueItems=True),
        ['["a", "b", 1]'],
        ['["a", "a"]', "[1, 1.0]"],
    ),
    refused(
        "`uniqueItems` of lists and objects",
        "",
        array(items=obj(), uniqueItems=True),
        '"uniqueItems" is enforced only where',
    ),
    enforced("`anyOf`, `allOf`", "", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["4"], ["2", "6"]),
    enforced(
        "`oneOf`",
        "if the branches exclude each other by type, const, range or a property",
        _PET,
        ['{"kind": "cat", "kids": [{"kind": "dog"}]}'],
        ['{"kind": "cow"}'],
    ),
    refused("other `oneOf`", "", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "might be of branches 0 and 1"),
    enforced(
        "`$ref`, `$anchor`",
        "within the schema",
        {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "const": 1}}},
        ["1"],
        ["2"],
    ),
    refused("`$ref` to other documents", "", {"$ref": "http://example.com/x"}, "is in another document"),
    enforced(
        "`not: {}`",
        "forbids everything, as `false` does: zod's `never`",
        array(items={"not": {}, "title": "T"}),
        ["[]"],
        ["[1]", "[[]]"],
    ),
    refused("other `not`", "", {"not": {"type": "string"}}, "not supported: not"),
    ignored("keywords that are null", "", {"type": ["integer"], "enum": None, "minimum": None}, ["1"], ['"a"']),
    *(
        refused(f"`{name}`", "", {name: {}}, f"not supported: {name}")
        for name in (
            *("if", "then", "else", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
            *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
        )
    ),
]


def table() -> str:
    """The table of the docs."""
    return "\n".join(["| feature | | remarks |", "|---|---|---|", *(feature.row for feature in FEATURES)])
