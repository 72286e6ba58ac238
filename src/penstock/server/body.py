"""Base classes of request bodies in all dialects.

A field with an unsupported value is refused by name (`UNSUPPORTED`, with the neutral values that are accepted). A field
that cannot change the answer is accepted (`WITHOUT_EFFECT`). An unknown field is refused if it looks like a typo, and
otherwise accepted. `ignored_fields` lists the fields accepted without effect, which the answer's header names. Null
means that the field is absent, in every object. Strings must be valid Unicode; in a conversation they are repaired.

    Body         a request, and the options in it
    HistoryItem  part of an earlier answer that is sent back: its unknown fields are accepted and not listed
"""

import contextlib
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from typing_extensions import Self, is_typeddict

from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.server.errors import refused_field

T = TypeVar("T")


IgnoredValues = dict[str, tuple[Any, ...]]
"""Unsupported fields, with the values that are accepted because they have no effect."""
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at its first invalid item: a million of them must not cost a million errors."""

MAX_METADATA = 16
MAX_UNKNOWN = 32
"""Maximum unknown fields of one object; each is compared with every known name."""
_LONGEST_NAME = 64
_TYPO = 0.8
"""Minimum `difflib` ratio for a name to count as a typo of another: `temprature`, `topK`, `repeat_penalty`."""
_TYPO_LENGTH = 4
"""Maximum difference in length of a typo: `background_tasks` is a different field than `background`."""
_TYPES = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class HistoryItem(BaseModel):
    """An object of an earlier turn: unknown fields, which other servers and clients add, are accepted."""

    model_config = _TYPES

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return _without_nulls(data) if isinstance(data, dict) else data


class Body(BaseModel):
    """A request body. Strict: types are not converted, except that 8.0 is accepted for the integer 8."""

    model_config = _TYPES

    UNSUPPORTED: ClassVar[IgnoredValues] = {}
    """Known fields that are refused, with the values that are accepted because they have no effect."""
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Known fields that cannot change the answer; any value is accepted."""
    _integers: ClassVar[frozenset[str]] = frozenset()
    _supported: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields in JSON."""
    _hints: tuple[str, ...] = PrivateAttr(())
    _unknown: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._supported = frozenset(field.alias or name for name, field in cls.model_fields.items())
        cls._integers = frozenset(name for name, field in cls.model_fields.items() if _is_integer(field.annotation))

    @model_validator(mode="wrap")
    @classmethod
    def _sort_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        data = _without_nulls(data)
        others = [name for name in data if name not in cls._supported]
        hints = tuple(name for name in others if name in cls.WITHOUT_EFFECT)
        unknown: tuple[str, ...] = ()
        if len(others) > len(hints):
            unknown = cls._check_others([name for name in others if name not in hints], data)
        for name in cls._integers & data.keys():
            data[name] = _as_integer(data[name])
        made = handler(data)
        made._hints, made._unknown = hints, unknown
        return made

    @classmethod
    def _check_others(cls, names: Iterable[str], data: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the unknown fields. Raises for an unsupported value of a known one, or a typo of a known name."""
        unknown = []
        for name in names:
            if name in cls.UNSUPPORTED:
                if not _is_one_of(data[name], cls.UNSUPPORTED[name]):
                    raise refused_field(name, f"{{}} is not supported here{_neutral(cls.UNSUPPORTED[name])}")
                continue
            name = str(name)[:_LONGEST_NAME]
            if close := _close_to(name, cls):
                raise refused_field(name, f"unknown parameter '{{}}'; did you mean {close!r}?")
            unknown.append(name)
            if len(unknown) > MAX_UNKNOWN:
                raise refused_field(name, f"more than {MAX_UNKNOWN} unknown parameters, the last '{{}}'")
        return tuple(unknown)

    def ignored_fields(self) -> "IgnoredFields":
        """Fields of this object and of the options in it that were accepted without effect."""
        found = IgnoredFields(dict.fromkeys(self._hints), dict.fromkeys(self._unknown))
        given = self.model_fields_set
        for name, field in type(self).model_fields.items():
            if name not in given:  # one of a hundred, and its default ignores nothing
                continue
            value = getattr(self, name)
            if isinstance(value, dict):
                found.unknown.update((f"{name}.{key}", None) for key in _unknown_keys(value, field.annotation))
            for item in value if isinstance(value, list) else (value,):
                if not isinstance(item, Body):
                    break  # lists are of one kind
                found.add(name, item.ignored_fields())
        return found


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """Fields that were accepted without effect, by path without indices: `tools.function.title`."""

    hints: dict[str, None]
    """Fields that are documented to have no effect."""
    unknown: dict[str, None]

    def add(self, name: str, within: "IgnoredFields") -> None:
        """Add the fields of the object at a field."""
        self.hints.update((f"{name}.{hint}", None) for hint in within.hints)
        self.unknown.update((f"{name}.{key}", None) for key in within.unknown)


def _unknown_keys(value: Mapping[str, Any], annotation: Any) -> Iterator[str]:
    """Paths of the keys of a typed dictionary, and of those in it, that its type does not have."""
    kind = next((member for member in (annotation, *get_args(annotation)) if is_typeddict(member)), None)
    if kind is None:
        return
    known = get_type_hints(kind)
    for name, item in value.items():
        if name not in known:
            yield name[:_LONGEST_NAME]
        elif isinstance(item, dict):
            yield from (f"{name}.{key}" for key in _unknown_keys(item, known[name]))


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _is_integer(annotation: Any) -> bool:
    """Whether a field takes integers and no other numbers."""
    kinds = {annotation, *get_args(annotation)}
    return int in kinds and float not in kinds


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _neutral(values: tuple[Any, ...]) -> str:
    return f": leave it out, or send {' or '.join(map(json.dumps, values))}" if values else ": leave it out"


@functools.lru_cache(4096)
def _close_to(name: str, cls: type[Body]) -> str | None:
    """The known field that an unknown name probably misspells (`topK` for `top_k`); None for ids."""
    if re.search(r"_ids?$|Ids?$", name):
        return None
    plain = {_plain(known): known for known in sorted(cls.model_fields.keys() | cls.UNSUPPORTED.keys())}
    near = [known for known in plain if abs(len(known) - len(_plain(name))) <= _TYPO_LENGTH]
    close = difflib.get_close_matches(_plain(name), near, n=1, cutoff=_TYPO)
    return plain[close[0]] if close else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


AS_INTEGER = BeforeValidator(_as_integer)
"""An integer in a list, which may be written as 8.0."""


def check_text(text: str, field: str) -> str:
    """Return the text unless it is invalid.

    Raises:
        InvalidRequestError: it contains an unpaired surrogate, which is valid in JSON but not in text.
    """
    if not text.isascii() and not _is_text(text):
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


def mend_conversation(content: object) -> None:
    """Replace unpaired surrogates in a body's conversation by U+FFFD, as browsers do (WHATWG's USVString).

    Agents truncate tool results in the middle of a surrogate pair, and resend that text with their history.
    """
    if isinstance(content, dict):
        for name in _CONVERSATION & content.keys():
            content[name] = _mended(content[name])


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value if _is_text(value) else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in value]
    return {_mended(name): _mended(item) for name, item in value.items()} if isinstance(value, dict) else value


_CONVERSATION = frozenset({"input", "instructions", "messages", "system"})
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
    """Context in which errors name the caller's field instead of the engine's name for it.

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
