"""The parts of a parsed chat answer: reasoning, text and tool calls.

A stream yields `Piece`s in the order in which the model wrote them; joined, they are `Part`s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import field

from penstock.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The start of a tool call; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON arguments of the latest call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call. The arguments are as the model wrote them: JSON, unless it erred or was cut off."""

    name: str
    arguments: str


Piece = Reasoning | Text | CallBegins | CallArguments
Part = Reasoning | Text | ToolCall


BETWEEN_PARTS = "\n"
"""Separator of parts that are joined to one text: texts around a call, or two pieces of reasoning."""


@dataclass(slots=True)
class PieceSeparators:
    """The separators of an answer's pieces, where those of a kind are sent as one text."""

    latest: type[Piece] | None = None
    kinds: set[type[Piece]] = field(default_factory=set)

    def before(self, piece: Piece) -> str:
        """The separator before a piece: a line break if another part has come since the last piece of its kind."""
        kind = type(piece)
        resumed = kind is not self.latest and kind in self.kinds
        self.latest = kind
        self.kinds.add(kind)
        return BETWEEN_PARTS if resumed else ""


def put_together(pieces: Iterable[Piece]) -> list[Part]:
    """Joins the pieces of one answer into its parts."""
    parts: list[Part] = []
    for piece in pieces:
        add(parts, piece)
    return parts


def add(parts: list[Part], piece: Piece) -> None:
    """Appends a piece to the last part, or starts a new part with it."""
    last = parts[-1] if parts else None
    if isinstance(piece, CallBegins):
        parts.append(ToolCall(piece.name, ""))
    elif isinstance(piece, CallArguments):
        assert isinstance(last, ToolCall), "arguments follow the beginning of their call"
        parts[-1] = ToolCall(last.name, last.arguments + piece.text)
    elif isinstance(piece, Text) and isinstance(last, Text):
        parts[-1] = Text(last.text + piece.text)
    elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
        parts[-1] = Reasoning(last.text + piece.text)
    else:
        parts.append(piece)


def begins(parts: Sequence[Part], piece: Piece) -> bool:
    """Whether a piece starts a new part."""
    if isinstance(piece, CallArguments):
        return False
    return isinstance(piece, CallBegins) or not parts or type(parts[-1]) is not type(piece)
