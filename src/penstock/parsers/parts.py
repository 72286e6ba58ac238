"""What an answer of a chat model is made of, once its text has been taken apart.

Of a stream, what is new comes as `Piece`s, in the order the model wrote them; put together, they are `Part`s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """What it says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """It calls a tool; the arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, JSON, of the call that began last."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. The arguments are what the model wrote: JSON, unless it erred or was cut off."""

    name: str
    arguments: str


Piece = Reasoning | Text | CallBegins | CallArguments
Part = Reasoning | Text | ToolCall


def put_together(pieces: Iterable[Piece]) -> list[Part]:
    """The parts that the pieces of one answer make, in their order."""
    parts: list[Part] = []
    for piece in pieces:
        add(parts, piece)
    return parts


def add(parts: list[Part], piece: Piece) -> None:
    """Let the last of an answer's parts grow by a piece, or a new one begin with it."""
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
    """Whether a new part begins with a piece."""
    if isinstance(piece, CallArguments):
        return False
    return isinstance(piece, CallBegins) or not parts or type(parts[-1]) is not type(piece)
