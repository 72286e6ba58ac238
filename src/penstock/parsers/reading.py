"""Incremental parsing of answers: a format is a generator that receives single characters, then "" at the end.

So the result cannot depend on how the text was split into deltas. A format reports to its `Reading` as soon as the
meaning of a character is known, so no piece is delayed without need.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

from penstock.api.tools import Function
from penstock.parsers.parts import CallArguments, CallBegins, Piece, Reasoning, Text

T = TypeVar("T")

Reader = Generator[None, str, T]
"""A generator that receives characters, then "" for as long as it runs, and returns T."""

LONGEST_NAME = 128
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_LONGEST_KEY = 64


class Reading:
    """The state of parsing one answer: text in, pieces out."""

    def __init__(self, program: "Callable[[Reading], Reader[None]]", functions: Iterable[Function]) -> None:
        """
        Args:
            program: the format to parse.
            functions: the offered tools; without any, nothing is parsed as a call.
        """
        self._functions = {function.name: function for function in functions}
        self._pieces: list[Piece] = []
        self._kind: type[Reasoning] | type[Text] | type[CallArguments] = Text
        self._characters: list[str] = []  # of the current piece
        self._spaces: list[str] = []  # trailing white space, emitted only if text of the same kind follows
        self._has_emitted = False
        self._has_other_parts = False
        self._buffered: list[str] | None = None
        self._pushed_back: list[str] = []  # a stack: the next character is its last
        self._ended = False
        self._program = program(self)
        next(self._program)

    def feed_text(self, text: str) -> list[Piece]:
        """Parses more text; returns the new pieces."""
        for character in text:
            self._send(character)
            while self._pushed_back:
                self._send(self._pushed_back.pop())
        return self._take()

    def finish(self) -> list[Piece]:
        """Parses the end of the answer; returns the last pieces."""
        while not self._ended:
            self._send(self._pushed_back.pop() if self._pushed_back else "")
        if self._spaces and not self._has_other_parts:
            self._put(Text, "".join(self._spaces))
        return self._take()

    def _send(self, character: str) -> None:
        if self._buffered is not None and character:
            self._buffered.append(character)
        try:
            self._program.send(character)
        except StopIteration:
            self._ended = True

    def _take(self) -> list[Piece]:
        self._close_piece()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _put(self, kind: type[Reasoning] | type[Text] | type[CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._close_piece()
            self._kind = kind
        self._characters.append(text)

    def _close_piece(self) -> None:
        if self._characters:
            self._pieces.append(self._kind("".join(self._characters)))
            self._characters = []

    def is_tool(self, name: str) -> bool:
        """Whether a tool of this name is offered."""
        return name in self._functions

    def may_call(self, name: str) -> bool:
        """Whether tagged text with this name is a call: a model may invent a tool, if the request offers any."""
        valid = 0 < len(name) <= LONGEST_NAME and _NAME_CHARACTERS.issuperset(name)
        return valid and bool(self._functions)

    def schema_of(self, name: str) -> Mapping[str, Any]:
        """The schema of a tool's arguments; without constraints if the tool is not offered."""
        return self._functions[name].schema if name in self._functions else {}

    # ── called by formats ─────────────────────────────────────────────────────────────────────────────────────────────

    def emit_text(self, text: str) -> None:
        """Adds text to the answer. White space beside reasoning and calls is dropped."""
        self._show(Text, text, leading=not self._has_other_parts)

    def emit_reasoning(self, text: str) -> None:
        """Adds text to the reasoning, without the white space around it."""
        self._show(Reasoning, text, leading=False)

    def _show(self, kind: type[Reasoning] | type[Text], text: str, leading: bool) -> None:
        for character in text:
            if character.isspace():
                self._spaces.append(character)
                continue
            if self._spaces and (self._has_emitted or leading):
                self._put(kind, "".join(self._spaces))
            self._spaces.clear()
            self._has_emitted = True
            self._put(kind, character)

    def turn(self) -> None:
        """Records the start or end of reasoning."""
        self._has_other_parts = True
        self._buffered = None
        self._spaces.clear()
        self._has_emitted = False

    def separate(self) -> None:
        """Inserts a line break before the next text or reasoning, unless it is the first."""
        if self._has_emitted:
            self._spaces.append("\n")

    def emit_call(self, name: str) -> None:
        """Starts a call; the held text belongs to it."""
        self._has_other_parts = True
        self._buffered = None
        self._spaces.clear()
        self._has_emitted = False
        self._close_piece()
        self._pieces.append(CallBegins(name))

    def emit_arguments(self, text: str) -> None:
        """Adds to the arguments of the current call."""
        self._put(CallArguments, text)

    def push_back(self, character: str) -> None:
        """Pushes back the character just read."""
        if character:
            self._pushed_back.append(character)
            if self._buffered is not None:
                self._buffered.pop()

    def buffer(self, text: str) -> None:
        """Holds back `text` and all that follows, until `emit_call`, `reject` or `read_again` settles it."""
        self._buffered = [text]

    def read_again(self) -> None:
        """Pushes back all held text."""
        assert self._buffered is not None
        self._pushed_back.extend(reversed("".join(self._buffered)))
        self._buffered = None

    def drop(self) -> None:
        """Drops held text: it is not part of the answer."""
        self._buffered = None

    def reject(self) -> None:
        """Releases held text as text of the answer."""
        assert self._buffered is not None
        held, self._buffered = "".join(self._buffered), None
        self.emit_text(held)


# ── building blocks of formats ───────────────────────────────────────────────────────────────────────────────────


def read_until(emit: Callable[[str], None], marker: str) -> Reader[bool]:
    """Passes text before a marker to `emit`. Returns whether the marker came before the end.

    Args:
        marker: must not contain its first character a second time, so that a failed match never hides another.
    """
    matched = 0
    while character := (yield):
        if matched and character != marker[matched]:
            emit(marker[:matched])
            matched = 0
        if character != marker[matched]:
            emit(character)
            continue
        matched += 1
        if matched == len(marker):
            return True
    emit(marker[:matched])
    return False


def skip_spaces() -> Reader[str]:
    """Skips white space; returns the character after it."""
    while (character := (yield)).isspace():
        pass
    return character


def expect(reading: Reading, text: str) -> Reader[bool]:
    """Consumes exactly this text; otherwise pushes back what was read and returns False."""
    for index, expected in enumerate(text):
        character = yield
        if character != expected:
            reading.push_back(character)
            for matched in reversed(text[:index]):
                reading.push_back(matched)
            return False
    return True


def name_of_tool(reading: Reading) -> Reader[str]:
    """Reads a tool name, of at most `LONGEST_NAME` + 1 characters."""
    name = ""
    while len(name) <= LONGEST_NAME:
        character = yield
        if character not in _NAME_CHARACTERS:
            reading.push_back(character)
            break
        name += character
    return name


def json_value(reading: Reading, take: Callable[[str], None], broken_by: str) -> Reader[None]:
    """Passes the characters of one JSON value to `take`; objects and arrays are matched by brackets alone.

    Args:
        broken_by: characters that end a malformed value, outside of strings.
    """
    depth, quoted, escaped, begun = 0, False, False, False
    while character := (yield):
        if quoted:
            take(character)
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
            if not quoted and depth == 0:
                return
            continue
        if character in broken_by or (depth == 0 and (character in ",}]" or (begun and character.isspace()))):
            reading.push_back(character)
            return
        take(character)
        begun = True
        quoted = character == '"'
        depth += (character in "{[") - (character in "}]")
        if depth == 0 and character in "}]":
            return


def json_string(reading: Reading, longest: int) -> Reader[str | None]:
    """Reads a JSON string of at most `longest` characters; None if there is none."""
    written: list[str] = []
    character = yield
    if character != '"':
        reading.push_back(character)
        return None
    escaped = False
    while character := (yield):
        if character == '"' and not escaped:
            break
        escaped = character == "\\" and not escaped
        written.append(character)
        if len(written) > 6 * longest:  # \u0041
            return None
    try:
        said = json.loads(f'"{"".join(written)}"')
    except ValueError:
        return None
    return said if character and isinstance(said, str) and len(said) <= longest else None


def arguments(reading: Reading, broken_by: str) -> Reader[None]:
    """Reads the current call's arguments: an object piece by piece, any other value once it is complete."""
    character = yield from skip_spaces()
    reading.push_back(character)
    if character == "{":
        yield from json_value(reading, reading.emit_arguments, broken_by)
        return
    written: list[str] = []
    yield from json_value(reading, written.append, broken_by)
    reading.emit_arguments(_object_of("".join(written)))


def _object_of(written: str) -> str:
    """Arguments that are not an object: null counts as {}, and a string may contain the object."""
    try:
        value = json.loads(written)
    except ValueError:
        return written
    return "{}" if value is None else value if isinstance(value, str) else written


def call_object(reading: Reading, is_name: Callable[[str], bool], broken_by: str = "") -> Reader[bool]:
    """Reads {"name": ..., "arguments": {...}}, with keys in any order and others ignored.

    Call it with text held, before the opening bracket. Returns whether it was a call; malformed text after the
    arguments is left to be read.

    Args:
        is_name: whether an object with this name is a call.
        broken_by: characters that end malformed arguments, outside of strings.
    """
    if not (yield from expect(reading, "{")):
        return False
    name, early, called = None, list[str](), False
    while True:
        reading.push_back((yield from skip_spaces()))
        key = yield from json_string(reading, _LONGEST_KEY)
        if key is None or (yield from skip_spaces()) != ":":
            return called
        reading.push_back((yield from skip_spaces()))
        if key == "name" and not called:
            name = yield from json_string(reading, LONGEST_NAME)
            if name is None or not is_name(name):
                return False
            if early:
                _call_whole(reading, name, "".join(early))
                called = True
        elif key in ("arguments", "parameters") and not called and name is not None:
            reading.emit_call(name)
            called = True
            yield from arguments(reading, broken_by)
        elif key in ("arguments", "parameters") and not called:
            yield from json_value(reading, early.append, broken_by)
        else:
            yield from json_value(reading, lambda _: None, broken_by)
        character = yield from skip_spaces()
        if character == ",":
            continue
        if character == "}" and name is not None and not called:
            _call_whole(reading, name, "null")
            called = True
        elif character != "}":
            reading.push_back(character)
        return called


def _call_whole(reading: Reading, name: str, written: str) -> None:
    reading.emit_call(name)
    reading.emit_arguments(written if written.startswith("{") else _object_of(written))
