"""Schemas that zod and pydantic write are accepted, and answers validate against them.

`zod.json` has what `z.toJSONSchema` of several versions writes for formats of strings, records and `never`. Left out
are those that nothing satisfies, and a template literal with an email before 4.6, whose look-ahead is refused.
"""

import datetime
import decimal
import ipaddress
import json
import pathlib
import re
import uuid
from enum import Enum
from fractions import Fraction
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, TypeAdapter

from penstock.api.sampling_params import Structured
from penstock.structured.grammar import compile_grammar
from tests.structured.answers import finished

ZOD: dict[str, Any] = json.loads((pathlib.Path(__file__).parent / "zod.json").read_text())


def answers(vocabulary, tokenizer, schema):
    """Some random documents of a schema, which come to an end."""
    grammar = compile_grammar(vocabulary, Structured.json_schema(schema))
    found = (finished(grammar, vocabulary, Random(seed), most=150) for seed in range(6))
    return [json.loads(tokenizer.decode(list(answer))) for answer in found if answer is not None]


@pytest.mark.parametrize("name", ZOD)
def test_answers_validate_against_the_schemas_of_zod(vocabulary, tokenizer, name):
    made = answers(vocabulary, tokenizer, ZOD[name])
    if r"\p" not in json.dumps(ZOD[name]):  # which Python's `re` does not know
        for document in made:
            Draft202012Validator(ZOD[name]).validate(document)


class Color(Enum):
    RED = "r"
    GREEN = "g"


class Pair(NamedTuple):
    first: int
    second: str = "x"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int | None = None


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: list["Dog"] = []


TYPES = [
    *(str, int, float, bool, bytes, None, Any, list, dict, tuple, complex, Color, Pair, Cat, Dog, Fraction),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, pathlib.Path),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
    *(ipaddress.IPv4Interface, ipaddress.IPv6Interface, re.Pattern),
    *(list[int], set[str], tuple[int, str], tuple[int, ...], dict[str, int], dict[int, str], dict[uuid.UUID, int]),
    *(dict[Color, int], dict[datetime.date, int], dict[Literal["a", "b"], int], str | None, Literal["a", 1, None]),
    *(pydantic.AnyUrl, pydantic.HttpUrl, pydantic.PostgresDsn, pydantic.SecretStr, pydantic.ByteSize, pydantic.UUID4),
    *(pydantic.Base64Bytes, pydantic.Base64UrlStr, pydantic.Json[int], pydantic.JsonValue, pydantic.IPvAnyNetwork),
    *(pydantic.PastDate, pydantic.AwareDatetime, pydantic.FilePath, pydantic.ImportString, pydantic.FiniteFloat),
    *(pydantic.conint(ge=1, lt=5), pydantic.confloat(gt=0, le=1, multiple_of=0.5), pydantic.conlist(int, max_length=3)),
    *(pydantic.condecimal(max_digits=5, decimal_places=2), pydantic.condecimal(max_digits=5)),
    pydantic.constr(pattern="^a+$", min_length=2),
    Annotated[Cat | Dog, Field(discriminator="kind")],
]


@pytest.mark.parametrize("type", TYPES, ids=str)
def test_the_schemas_of_pydantic_are_accepted(vocabulary, tokenizer, type):
    for mode in ("validation", "serialization"):
        schema = TypeAdapter(type).json_schema(mode=mode)
        for document in answers(vocabulary, tokenizer, schema):
            Draft202012Validator(schema).validate(document)
