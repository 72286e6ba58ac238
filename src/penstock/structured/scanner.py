"""Tracks the JSON in an answer byte by byte: the keys of open objects and the items of open lists.

The grammar guarantees valid JSON, so only quotes, brackets and commas matter. States are immutable: a token is tried
by computing the next state and dropping it.
"""

import enum
import json
import re
from collections.abc import Callable, Hashable, Mapping
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from penstock.api.sampling_params import JsonRegions
from penstock.structured.json_schema.spots import PartConstraints


class Mode(enum.Enum):
    """The scanner's position in an answer."""

    THINKING = enum.auto()
    """In the reasoning that precedes the answer."""
    BEGIN = enum.auto()
    """At the first token, before it is known whether the answer begins with reasoning."""
    TEXT = enum.auto()
    """Outside JSON."""
    DOCUMENT = enum.auto()
    """At the beginning of a JSON document."""
    VALUE = enum.auto()
    """Before a value: in a list, or after a key."""
    KEY = enum.auto()
    STRING = enum.auto()
    SCALAR = enum.auto()
    """In a number, true, false or null."""
    BEFORE_KEY = enum.auto()
    AFTER_KEY = enum.auto()
    AFTER_VALUE = enum.auto()


class Level(NamedTuple):
    """An open object or list."""

    outer: "Level | None"
    is_object: bool
    schemas: frozenset[str]
    """JSON pointers of the schemas that may apply to it."""
    used: frozenset[Hashable] = frozenset()
    """The keys so far, or the items so far of a list with `uniqueItems`."""
    unique: bool = False
    """Whether the items must be unique; keys always are."""
    key: bytes = b""
    """The current or latest key."""
    commas: int = 0
    """Number of commas so far, which is the index of the current item."""


class State(NamedTuple):
    mode: Mode
    level: Level | None = None
    text: bytes = b""
    """The current key, item or tag so far; outside JSON, the tail of the text."""
    escaped: bool = False
    """Whether the next character follows a backslash."""


_STRING_STOP = re.compile(rb'["\\]')
_SCALAR_STOP = re.compile(rb"[,\]}\s]")
_BLANKS = (b" ", b"\t", b"\r", b"\n")
_MARK = re.compile(r'<\[(?P<token>\d+)\]>|(?P<text>"(?:\\.|[^"\\])*")')
_OUTSIDE = frozenset({Mode.THINKING, Mode.BEGIN, Mode.TEXT, Mode.DOCUMENT})


_Step = tuple[State, int]
"""A state, and its position in the text."""


def _bytes_of(mark: str) -> bytes:
    """The bytes of a tag in Lark's notation: literals and special tokens, in the form that the scanner reads."""
    parts = _MARK.finditer(mark)
    return b"".join(
        _special(int(part["token"])) if part["token"] else str(json.loads(part["text"])).encode() for part in parts
    )


def _special(token: int) -> bytes:
    """Bytes that represent a special token; no text contains them."""
    return b"\xff<[%d]>" % token


class Scanner:
    """Finds the JSON documents of an answer and the lists with unique items in them."""

    def __init__(self, documents: JsonRegions, spots: Mapping[str, PartConstraints]) -> None:
        self._documents = documents
        self._spots = spots
        self._marks = [_bytes_of(mark) for mark in documents.after if mark]
        self._open, self._close = map(_bytes_of, documents.thinking or ("", ""))
        self._longest = max(1, *map(len, [*self._marks, self._close]))
        self._root = self._with_others([""]) if spots else frozenset()

    def start(self) -> State:
        """The state before the first token."""
        if self._documents.thinks_first:
            return State(Mode.THINKING)
        return State(Mode.BEGIN) if self._documents.thinking else self._answer()

    def _answer(self) -> State:
        """The state at the beginning of the answer, after any reasoning."""
        return State(Mode.DOCUMENT if "" in self._documents.after else Mode.TEXT)

    def follow(self, state: State, token: int, text: bytes) -> State | None:
        """The state after a token; None if the token repeats a key or an item.

        Args:
            text: the token's bytes; empty for a special token.
        """
        if not text:
            # Within a document a special token can only be the end.
            if state.mode not in _OUTSIDE:
                return state
            text = _special(token)
        at = 0
        while at < len(text):
            step = _READERS[state.mode](self, state, text, at)
            if step is None:
                return None
            state, at = step
        return state

    # ── outside of documents ─────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, state: State, text: bytes, at: int) -> _Step:
        """Decide by the first characters whether the answer begins with reasoning."""
        read = state.text + text[at : at + 1]
        if read == self._open:
            return State(Mode.THINKING), at + 1
        if self._open.startswith(read):
            return State(Mode.BEGIN, text=read), at + 1
        # It does not: what was read so far is of the answer, and too short to hold a key twice.
        return self._read(self._answer(), state.text), at

    def _read(self, state: State, text: bytes) -> State:
        at = 0
        while at < len(text):
            step = _READERS[state.mode](self, state, text, at)
            assert step is not None
            state, at = step
        return state

    def _thinking(self, state: State, text: bytes, at: int) -> _Step:
        end = _end_of_mark([self._close], state.text, text, at)
        return (
            (self._answer(), end)
            if end
            else (State(Mode.THINKING, text=(state.text + text[at:])[-self._longest :]), len(text))
        )

    def _text(self, state: State, text: bytes, at: int) -> _Step:
        end = _end_of_mark(self._marks, state.text, text, at)
        return (
            (State(Mode.DOCUMENT), end)
            if end
            else (State(Mode.TEXT, text=(state.text + text[at:])[-self._longest :]), len(text))
        )

    def _document(self, state: State, text: bytes, at: int) -> _Step:
        character = text[at : at + 1]
        if character in _BLANKS and not state.text:
            return state, at + 1
        read = state.text + character
        if any(mark.startswith(read) for mark in self._marks):  # a mark may begin with a bracket, too
            return State(Mode.DOCUMENT, text=b"" if read in self._marks else read), at + 1
        if read[:1].decode("latin-1") in self._documents.brackets:
            return self._read(State(Mode.VALUE), state.text), at
        return self._read(State(Mode.TEXT), state.text), at

    # ── in a document ────────────────────────────────────────────────────────────────────────────────────────────────

    def _value(self, state: State, text: bytes, at: int) -> _Step:
        character, level = text[at : at + 1], state.level
        if character in (b"{", b"["):
            return self._opened(level, character == b"{"), at + 1
        if character == b'"':
            return State(Mode.STRING, level), at + 1
        if character == b"]":
            return self._closed(level), at + 1
        if character in _BLANKS:
            return state, at + 1
        return State(Mode.SCALAR, level), at

    def _string(self, state: State, text: bytes, at: int) -> _Step | None:
        """Read a string up to its end or a backslash. The text is kept only if it must be unique."""
        kept = state.mode is Mode.KEY or (state.level is not None and state.level.unique)
        if state.escaped:
            return state._replace(escaped=False, text=state.text + text[at : at + 1] if kept else b""), at + 1
        # By a search: strings are most of a document.
        stop = _STRING_STOP.search(text, at)
        end = stop.start() if stop else len(text)
        read = state.text + text[at:end] if kept else b""
        if stop is None:
            return state._replace(text=read), end
        if stop[0] == b"\\":
            return state._replace(text=read + b"\\" if kept else b"", escaped=True), end + 1
        level = state.level
        if not kept or level is None:
            return State(Mode.AFTER_VALUE, level), end + 1
        item = read if level.is_object else b'"' + read
        if item in level.used:
            return None
        level = level._replace(used=level.used | {item}, key=read)
        return State(Mode.AFTER_KEY if level.is_object else Mode.AFTER_VALUE, level), end + 1

    def _scalar(self, state: State, text: bytes, at: int) -> _Step | None:
        stop = _SCALAR_STOP.search(text, at)
        end = stop.start() if stop else len(text)
        read = state.text + text[at:end]
        level = state.level
        if stop is None:
            return state._replace(text=read), end
        if level is None or not level.unique:
            return State(Mode.AFTER_VALUE, level), end
        item = scalar(read)
        if item in level.used:
            return None
        return State(Mode.AFTER_VALUE, level._replace(used=level.used | {item})), end

    def _after_value(self, state: State, text: bytes, at: int) -> _Step:
        character, level = text[at : at + 1], state.level
        if character in (b"}", b"]") or level is None:
            return self._closed(level), at + 1
        if character != b",":
            return state, at + 1
        level = level._replace(commas=level.commas + 1)
        return State(Mode.BEFORE_KEY if level.is_object else Mode.VALUE, level), at + 1

    def _before_key(self, state: State, text: bytes, at: int) -> _Step:
        character = text[at : at + 1]
        if character == b'"':
            return State(Mode.KEY, state.level), at + 1
        return (self._closed(state.level) if character == b"}" else state), at + 1

    def _after_key(self, state: State, text: bytes, at: int) -> _Step:
        return (State(Mode.VALUE, state.level) if text[at : at + 1] == b":" else state), at + 1

    def _opened(self, outer: Level | None, is_object: bool) -> State:
        schemas = self._inside(outer)
        unique = not is_object and any(self._spots[name].unique for name in schemas)
        return State(Mode.BEFORE_KEY if is_object else Mode.VALUE, Level(outer, is_object, schemas, unique=unique))

    def _closed(self, level: Level | None) -> State:
        outer = None if level is None else level.outer
        return State(Mode.TEXT if outer is None else Mode.AFTER_VALUE, outer)

    # ── which schemas apply ──────────────────────────────────────────────────────────────────────────────────────────

    def values(self, level: Level) -> frozenset[bytes] | None:
        """All allowed items of a list, as written; None if there are too many."""
        listed = [self._spots[name].values for name in level.schemas if self._spots[name].unique]
        if not listed or None in listed:
            return None
        return frozenset(item for items in listed for item in items or ())

    def _inside(self, level: Level | None) -> frozenset[str]:
        """The schemas that may apply to the value that begins here."""
        if level is None or not self._spots:
            return self._root
        pointers: list[str] = []
        name = _decoded(level.key) if level.is_object else ""
        for spot in (self._spots[pointer] for pointer in level.schemas):
            if not level.is_object:
                pointers += spot.prefix[level.commas : level.commas + 1] or [spot.items_after]
            else:
                pointers += [*spot.patterns, spot.properties.get(name, spot.additional)]
        return self._with_others(pointers)

    def _with_others(self, pointers: list[str]) -> frozenset[str]:
        """The schemas, and all that apply to the same value."""
        seen: set[str] = set()
        pending = list(pointers)
        while pending:
            pointer = pending.pop()
            if pointer not in seen:
                seen.add(pointer)
                pending += self._spots[pointer].also
        return frozenset(seen)


def scalar(written: bytes) -> Hashable:
    """A key that is equal for equal numbers (1 and 1.0) and for equal words."""
    try:
        return Decimal(written.decode())
    except InvalidOperation:  # it is a word, or its exponent has more digits than memory has bytes
        return written


def _decoded(key: bytes) -> str:
    return str(json.loads(b'"' + key + b'"'))


def _end_of_mark(marks: list[bytes], before: bytes, text: bytes, at: int) -> int:
    """End position in `text` of the first tag, which may begin in the preceding text; 0 if there is none."""
    whole = before + text[at:]
    ends = [whole.find(mark) + len(mark) for mark in marks if mark in whole]
    return max(min(ends) - len(before), 0) + at if ends else 0


_Reader = Callable[[Scanner, State, bytes, int], "_Step | None"]
_READERS: dict[Mode, _Reader] = {
    Mode.THINKING: Scanner._thinking,
    Mode.BEGIN: Scanner._begin,
    Mode.TEXT: Scanner._text,
    Mode.DOCUMENT: Scanner._document,
    Mode.VALUE: Scanner._value,
    Mode.KEY: Scanner._string,
    Mode.STRING: Scanner._string,
    Mode.SCALAR: Scanner._scalar,
    Mode.BEFORE_KEY: Scanner._before_key,
    Mode.AFTER_KEY: Scanner._after_key,
    Mode.AFTER_VALUE: Scanner._after_value,
}
