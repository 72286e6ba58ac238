"""What bodies of all dialects have in common.

A parameter is obeyed, or refused by name. Those that a dialect or its kin know and this server does not obey stand in
a class's `NOT_OBEYED`, with the values that ask for nothing; null always asks for nothing.
"""

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from penstock.errors import InvalidRequestError

T = TypeVar("T")

Neutral = dict[str, tuple[Any, ...]]
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a body of a million of them must not cost a million errors."""

MAX_METADATA = 16
_LONGEST_NAME = 64


class Body(BaseModel):
    """Strict: types are not converted, and unknown fields are refused with the nearest known name."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    NOT_OBEYED: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_obeyed(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() <= cls.__pydantic_fields__.keys():
            return data
        for name, value in data.items():
            if name in cls.NOT_OBEYED:
                if value is not None and not _is_one_of(value, cls.NOT_OBEYED[name]):
                    raise InvalidRequestError(f"{name} is not supported here{_neutral(cls.NOT_OBEYED[name])}", name)
            elif name not in cls.model_fields:
                name = str(name)[:_LONGEST_NAME]
                close = difflib.get_close_matches(name, [*cls.model_fields, *cls.NOT_OBEYED], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise InvalidRequestError(f"unknown parameter {name!r}{hint}", name)
        return {name: value for name, value in data.items() if name in cls.model_fields}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _neutral(values: tuple[Any, ...]) -> str:
    return f": leave it out, or send {' or '.join(map(json.dumps, values))}" if values else ": leave it out"


def check_text(text: str, field: str) -> str:
    """The text, if it is one.

    Raises:
        InvalidRequestError: it holds half of a surrogate pair, which JSON can carry and no text does.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{field} holds half of a surrogate pair: it is not text", field) from None
    return text


def _check_metadata(given: Any) -> Any:
    if isinstance(given, dict):
        if len(given) > MAX_METADATA:
            raise InvalidRequestError(f"metadata has {len(given)} entries; at most {MAX_METADATA}", "metadata")
        for text in (*given, *given.values()):
            check_text(str(text), "metadata")
    return given


Metadata = Annotated[dict[str, str], BeforeValidator(_check_metadata)]


@contextlib.contextmanager
def in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Let refusals name the field that the caller wrote, where the engine knows it by another name."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise
