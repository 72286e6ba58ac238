"""Translates JSON Schema's regular expressions (ECMA-262) to the dialect of the grammar library.

The library reads some of them differently: `[[:alpha:]]`, `&&` and `--` in classes, `.` and `\\s`, groups with flags.
Here each is written so that its meaning stays the same; if that is impossible, it is refused.
"""

import re
from collections.abc import Iterator

from penstock.structured.json_schema.document import SchemaError
from penstock.structured.json_schema.look_ahead import conjuncts

_DOT = r"[^\n\r\x{2028}\x{2029}]"
_ANY = r"[\x{0}-\x{10ffff}]"
_SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_PERHAPS_SPACE = r"\x{1c}-\x{1f}\x{85}\x{feff}"
"""Characters that `\\s` matches in only one of ECMA-262 and Python; answers may be validated with either."""
_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PAIR = re.compile(r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def translate(pattern: str, pointer: str) -> list[str]:
    """Expressions of the library that all match a text if and only if this one does.

    Raises:
        SchemaError: it is no regular expression of ECMA-262, or has look-around, boundaries or references back.
    """
    return ["".join(_Translation(conjunct, pointer).pieces()) for conjunct in conjuncts(pattern)]


def translate_one(pattern: str, pointer: str) -> str:
    """The expression of the library that matches the same texts.

    Raises:
        SchemaError: as `translate`; also if it takes several.
    """
    first, *others = translate(pattern, pointer)
    if others:
        raise SchemaError(pointer, f"the regular expression {pattern[:80]!r} has look-ahead, which names cannot have")
    return first


class _Translation:
    """Translates one expression in a single pass."""

    def __init__(self, pattern: str, pointer: str) -> None:
        self._pattern = pattern
        self._pointer = pointer
        self._at = 0

    def pieces(self) -> Iterator[str]:
        repeatable = False
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if quantifier := self._match(_QUANTIFIER):
                yield self._quantifier(quantifier[0], repeatable)
                repeatable = False
                continue
            if self._pattern.startswith("{,", self._at):
                raise self._error("has '{,': some libraries read it as '{0,', others literally")
            repeatable = character not in "^$|("
            if character == "(":
                yield self._group()
                continue
            self._at += 1
            if character == "\\":
                yield self._escape()
            elif character == "[":
                yield self._class()
            elif character == ".":
                yield _DOT
            elif character in "^$|)":
                yield character
            else:
                yield _literal(ord(character))

    def _match(self, expression: "re.Pattern[str]") -> "re.Match[str] | None":
        found = expression.match(self._pattern, self._at)
        if found:
            self._at = found.end()
        return found

    def _error(self, reason: str) -> SchemaError:
        return SchemaError(self._pointer, f"the regular expression {self._pattern[:80]!r} {reason}")

    def _quantifier(self, text: str, repeatable: bool) -> str:
        if not repeatable:
            raise self._error(f"has nothing for {text!r} to repeat")
        if self._pattern.startswith("?", self._at):  # as few as possible: of a whole match that changes nothing
            self._at += 1
        return text

    def _group(self) -> str:
        if self._match(_GROUP):
            return "(?:"
        what = "look-around" if self._pattern[self._at : self._at + 3] in ("(?=", "(?!", "(?<") else "flags"
        raise self._error(f"has {what}, which cannot be enforced")

    def _escape(self) -> str:
        """Translate an escape outside a character class."""
        if self._at == len(self._pattern):
            raise self._error("ends with a backslash")
        letter = self._pattern[self._at]
        if letter in "bB":
            raise self._error("has a word boundary, which is look-around and cannot be enforced")
        if letter in "123456789k":
            raise self._error("has backreferences, which cannot be enforced")
        inside = self._set()
        return _literal(self._code()) if inside is None else inside

    def _set(self, negated: bool = False) -> str | None:
        """Translate a class escape, such as that of digits; None if it is another. `negated`: the class around it."""
        if found := self._match(_PROPERTY):
            return "\\" + found[0]
        letter = self._pattern[self._at]
        inside = _SETS.get(letter.lower())
        if inside is None:
            return None
        self._at += 1
        if letter in "sS" and (letter == "S") is not negated:
            inside += _PERHAPS_SPACE
        return f"[{inside}]" if letter.islower() else f"[^{inside}]"

    def _code(self) -> int:
        """The code point of a character escape."""
        if found := self._match(_PAIR):
            high, low = (int(half, 16) for half in found.groups())
            return 0x10000 + (high - 0xD800 << 10) + (low - 0xDC00)
        if found := self._match(_CODE):
            code = int(next(filter(None, found.groups())), 16)
            if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
                raise self._error("names an unpaired surrogate, or no character at all")
            return code
        letter = self._pattern[self._at]
        self._at += 1
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter.isascii() and letter.isalnum():
            raise self._error(f"has \\{letter}, which is no escape of ECMA-262")
        return ord(letter)

    def _class(self) -> str:
        """Translate a character class whose opening bracket was read."""
        end = "^" if self._pattern.startswith("^", self._at) else ""
        self._at += len(end)
        made = [f"[{end}"]
        while True:
            first = self._member(negated=bool(end))
            if first is None:
                break
            if isinstance(first, str) or not self._is_range():
                made.append(first if isinstance(first, str) else _code_point(first))
                continue
            self._at += 1
            last = self._member(negated=bool(end))
            if not isinstance(last, int) or last < first:
                raise self._error("has a range in a class whose ends are out of order or no characters")
            made.append(f"{_code_point(first)}-{_code_point(last)}")
        if len(made) > 1:
            return "".join([*made, "]"])
        if end:
            return _ANY
        raise self._error("has an empty class, which nothing matches")

    def _member(self, negated: bool) -> int | str | None:
        """The next member of a class: a code point, or a translated class escape; None at its end."""
        if self._at == len(self._pattern):
            raise self._error("has an unclosed class")
        character = self._pattern[self._at]
        self._at += 1
        if character == "]":
            return None
        if character != "\\":
            return ord(character)
        if self._at == len(self._pattern):
            raise self._error("ends with a backslash")
        if self._pattern[self._at] == "b":
            self._at += 1
            return 8
        if (inside := self._set(negated)) is not None:
            return inside
        return self._code()

    def _is_range(self) -> bool:
        return self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)


def _literal(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and (character.isalnum() or character in "_ ") else _code_point(code)


def _code_point(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
