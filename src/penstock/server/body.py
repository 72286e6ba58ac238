"""Base class of request bodies in all dialects.

A parameter is obeyed, or refused by name. A class's `NOT_OBEYED` lists known parameters that this server does not
support, with the values that have no effect; null never has an effect. All strings must be valid Unicode. Large bodies
are validated in a thread (`LargeBodyRoute`), so that the event loop stays free.
"""

import contextlib
import difflib
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.frontend.large_work import LargeWork
from penstock.sampling_params import RoundedNumber
from penstock.server.errors import refused_field

T = TypeVar("T")


Neutral = dict[str, tuple[Any, ...]]
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at its first invalid item: a million of them must not cost a million errors."""

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
                    raise refused_field(name, f"{{}} is not supported here{_neutral(cls.NOT_OBEYED[name])}")
            elif name not in cls.model_fields:
                name = str(name)[:_LONGEST_NAME]
                close = difflib.get_close_matches(name, [*cls.model_fields, *cls.NOT_OBEYED], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise refused_field(name, f"unknown parameter '{{}}'{hint}")
        return {name: value for name, value in data.items() if name in cls.model_fields}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _neutral(values: tuple[Any, ...]) -> str:
    return f": leave it out, or send {' or '.join(map(json.dumps, values))}" if values else ": leave it out"


def check_text(text: str, field: str) -> str:
    """Return the text unless it is invalid.

    Raises:
        InvalidRequestError: it contains an unpaired surrogate, which is valid in JSON but not in text.
    """
    if not _is_text(text):
        raise InvalidRequestError(f"{field} contains an unpaired surrogate, so it is not text", field)
    return text


def may_hold_half_a_pair(raw: bytes) -> bool:
    """Whether a JSON body may contain a surrogate: escaped, in invalid UTF-8, or in another encoding."""
    return any(mark in raw for mark in _MARKS_OF_SURROGATES) or b"\0" in raw[:4]


def check_all_text(content: object) -> None:
    """Check every string in a parsed body, including field names.

    Raises:
        InvalidRequestError: one contains an unpaired surrogate; `param` is its field.
    """
    waiting: list[tuple[object, _FieldPath | None]] = [(content, None)]
    while waiting:
        value, path = waiting.pop()
        items: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list) else ()
        for name, item in value.items() if isinstance(value, dict) else items:
            if isinstance(item, (dict, list)):
                waiting.append((item, _FieldPath(name, path)))
            if not (_is_text(item) and _is_text(name)):
                field = str(_FieldPath(name, path))
                raise InvalidRequestError(f"{field} contains an unpaired surrogate, so it is not text", field)


_MARKS_OF_SURROGATES = (b"\\ud", b"\\uD", b"\xed")


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _FieldPath:
    """Location of a value in a body; as text, in the caller's notation: `messages[0].content`."""

    name: str | int
    within: "_FieldPath | None"

    def __str__(self) -> str:
        path, at = "", self
        while True:
            path = (f"[{at.name}]" if isinstance(at.name, int) else f".{at.name[:_LONGEST_NAME]}") + path
            if at.within is None:
                return path.removeprefix(".")
            at = at.within


def _check_metadata(given: Any) -> Any:
    if isinstance(given, dict):
        if len(given) > MAX_METADATA:
            raise InvalidRequestError(f"metadata has {len(given)} entries; at most {MAX_METADATA}", "metadata")
        for text in (*given, *given.values()):
            check_text(str(text), "metadata")
    return given


Metadata = Annotated[dict[str, str], BeforeValidator(_check_metadata)]


@contextlib.contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors name the caller's field where the engine has another name for it.

    In a message the name is replaced where it cannot be an ordinary word: at the beginning, or with an underscore.
    """
    try:
        yield
    except InvalidRequestError as error:
        name = error.param or ""
        if name in names:
            error.param = names[name]
            pattern = rf"(?<![\w.]){re.escape(name)}\b" if "_" in name else rf"^{re.escape(name)}\b"
            error.args = (re.sub(pattern, lambda _: names[name], str(error)), *error.args[1:])
        raise


LARGE_BODY = 65_536
"""Bodies of this many bytes take milliseconds to validate, so a thread validates them."""
_LONG_NUMBER = re.compile(rb"\d[\d.]{15}")
"""Numbers with more digits than a double may represent; integers are exact in Python."""


class CheckedRequest(Request):
    """A request whose body has been checked already: its JSON is the checked object."""

    def __init__(self, request: Request, raw: bytes, checked: object) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._checked = checked

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._checked


class LargeBodyRoute(APIRoute):
    """Lets FastAPI validate small bodies, and validates large ones in a thread, with the same result."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_large(request: Request) -> Response:
            raw = await request.body()
            if self.body_field is None:
                return await handle(request)
            with contextlib.suppress(ValueError, RecursionError):  # not JSON: FastAPI reports it
                if len(raw) >= LARGE_BODY:
                    work: LargeWork = request.app.state.large_work
                    request = CheckedRequest(request, raw, await work.run(len(raw), lambda: self._check(raw)))
                elif _LONG_NUMBER.search(raw):
                    request = CheckedRequest(request, raw, self._check(raw))
                elif may_hold_half_a_pair(raw):
                    check_all_text(json.loads(raw))
            return await handle(request)

        return handle_large

    def _check(self, raw: bytes) -> object:
        """
        Raises:
            InvalidRequestError: a string in it is not valid Unicode.
            RequestValidationError: it is JSON, but does not match the route's schema.
        """
        assert self.body_field is not None
        content = json.loads(raw, parse_float=_number)
        if may_hold_half_a_pair(raw):
            check_all_text(content)
        checked, errors = self.body_field.validate(content, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=content)
        return checked


def _number(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value) or Decimal(literal) == Decimal(repr(value)):
        return value
    rounded = RoundedNumber(value)
    rounded.literal = literal
    return rounded
