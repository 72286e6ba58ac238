r"""Regular expressions for module names that match in bounded time, as PEFT's files are untrusted.

`re` backtracks, which can take exponential time, during which no other thread runs. This is Thompson's
simulation of an automaton (Regular Expression Search Algorithm, 1968): its time grows with the length of the name times
that of the expression. Supported is what PEFT's users write: characters, classes, ., |, groups, ^, $, \b, and the
repetitions *, +, ? and {m,n}, also lazy ones, as only whole matches count.
"""

import re
from collections.abc import Callable, Iterable

from penstock.errors import AdapterError, shown

MAX_STATES = 1000
_MAX_DEPTH = 32
_PLAIN = re.compile(r"[\w.-]+")
_ATOM = re.compile(r"\[\^?[\w.\\-]+\]|\\[dDwWsS]|\\[^\w\n]|[^\\\[\](){}|*+?^$\n]")
_ASSERTION = re.compile(r"\^|\$|\\[bAZ]")
_REPETITION = re.compile(r"(?:([*+?])|\{(\d{1,4})(?:(,)(\d{1,4})?)?\})\??(?![*+?{])")
_BOUNDS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}

_Holds = Callable[[str, int], object]
"""Whether a state can be left at a position in a name."""
_Part = Callable[[int], int]
"""Creates the states of a part of an expression, given the state that follows; returns the first one."""


class NamePattern:
    """A regular expression from a file.

    Raises:
        AdapterError: the expression is invalid or not supported.
    """

    def __init__(self, key: str, text: str) -> None:
        """
        Args:
            key: the config file's key, for errors.
        """
        self.text = text
        self._states: list[tuple[bool, _Holds, tuple[int, ...]]] = [(False, lambda name, place: False, ())]
        """(Whether it consumes a character, when it can be left, the next states); the first state is the end."""
        self._plain = re.compile(rf"(?:.*\.)?(?:{text})") if _PLAIN.fullmatch(text) else None
        try:
            part, place = self._alternatives(0, 0)
            if place < len(text):
                raise ValueError(f"unbalanced parenthesis at {place}")
            self._first = 0 if self._plain else part(0)
        except (ValueError, re.error) as error:
            raise AdapterError(
                f"{key} has {shown(text)}, which is not a regular expression, or not a supported one: {error}"
            ) from None

    @property
    def num_states(self) -> int:
        """Number of states of its automaton; 0 for a plain name."""
        return len(self._states) - 1

    def matches(self, name: str, start: int = 0, end: int | None = None) -> bool:
        """Whether the expression matches this part of a name."""
        if self._plain:
            return re.fullmatch(self.text, name[start:end]) is not None
        end = len(name) if end is None else end
        reached = self._reached([self._first], name, start)
        for place in range(start, end):
            following = (
                state
                for before in reached
                for takes, holds, after in (self._states[before],)
                if takes and holds(name, place)
                for state in after
            )
            reached = self._reached(following, name, place + 1)
        return 0 in reached

    def matches_end(self, name: str) -> bool:
        """Whether the expression matches the last components of a name."""
        if self._plain:
            return self._plain.fullmatch(name) is not None
        return any(self.matches(name, start) for start in starts(name))

    def _reached(self, states: Iterable[int], name: str, place: int) -> set[int]:
        """The closure of these states: those reachable without consuming a character."""
        reached: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state not in reached:
                reached.add(state)
                takes, holds, after = self._states[state]
                if not takes and holds(name, place):
                    waiting.extend(after)
        return reached

    def _add(self, takes: bool, holds: _Holds, *after: int) -> int:
        if len(self._states) > MAX_STATES:
            raise ValueError(f"it is too long: more than {MAX_STATES} characters, repetitions counted")
        self._states.append((takes, holds, after))
        return len(self._states) - 1

    def _alternatives(self, place: int, depth: int) -> tuple[_Part, int]:
        """Parse from an index: (the part, the index after it)."""
        if depth > _MAX_DEPTH:
            raise ValueError("groups are nested too deeply")
        choices = []
        while True:
            part, place = self._sequence(place, depth)
            choices.append(part)
            if not self.text.startswith("|", place):
                break
            place += 1
        return lambda then: self._add(False, _always, *[choice(then) for choice in choices]), place

    def _sequence(self, place: int, depth: int) -> tuple[_Part, int]:
        parts: list[_Part] = []
        while place < len(self.text) and self.text[place] not in "|)":
            part, place = self._single(place, depth)
            if repetition := _REPETITION.match(self.text, place):
                part, place = self._repeated(part, *_bounds(repetition)), repetition.end()
            parts.append(part)

        def make(then: int) -> int:
            for part in reversed(parts):
                then = part(then)
            return then

        return make, place

    def _single(self, place: int, depth: int) -> tuple[_Part, int]:
        if group := re.compile(r"\((?:\?:)?(?!\?)").match(self.text, place):
            part, place = self._alternatives(group.end(), depth + 1)
            if not self.text.startswith(")", place):
                raise ValueError("missing )")
            return part, place + 1
        if found := _ASSERTION.match(self.text, place):
            assertion = re.compile(found[0])
            return lambda then: self._add(False, assertion.match, then), found.end()
        if found := _ATOM.match(self.text, place):
            character = re.compile(found[0])
            return lambda then: self._add(True, character.match, then), found.end()
        raise ValueError(f"{shown(self.text[place : place + 10])} at {place}")

    def _repeated(self, part: _Part, least: int, most: int | None) -> _Part:
        def make(then: int) -> int:
            if most is None:
                loop = self._add(False, _always)
                self._states[loop] = (False, _always, (part(loop), then))
                first = loop
            else:
                first = then
                for _ in range(most - least):
                    first = self._add(False, _always, part(first), then)
            for _ in range(least):
                first = part(first)
            return first

        return make


def starts(name: str) -> list[int]:
    """Indices at which the components of a name begin."""
    return [0, *(place + 1 for place, character in enumerate(name) if character == ".")]


def _always(name: str, place: int) -> bool:
    return True


def _bounds(repetition: "re.Match[str]") -> tuple[int, int | None]:
    sign, least, comma, most = repetition.groups()
    if sign:
        return _BOUNDS[sign]
    bounds = int(least), (int(most) if most else None) if comma else int(least)
    if bounds[1] is not None and bounds[1] < bounds[0]:
        raise ValueError("min repeat greater than max repeat")
    return bounds
