"""Which format a checkpoint's answers have: its chat template shows it.

A template writes the calls of earlier turns, or tells the model how to write them; the marks in it are those that the
model was trained to write.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from penstock.parsers import hermes, llama, mistral, reasoning
from penstock.parsers.parts import Piece, Text
from penstock.parsers.reading import Reader, Reading
from penstock.parsers.reasoning import Marks


class Parser(Protocol):
    """Takes one answer apart as it comes."""

    def feed(self, text: str) -> list[Piece]:
        """What this text makes known."""

    def finish(self) -> list[Piece]:
        """What is known once no more text comes."""


class Plain:
    """An answer that is nothing but text."""

    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls of tools."""

    name: str
    read: Callable[[Reading], Reader[None]]
    marks: tuple[str, ...]
    """What may be special tokens, which a text does not show unless it is asked to."""


HERMES = ToolFormat("hermes", hermes.read, (hermes.OPEN, hermes.CLOSE))
LLAMA = ToolFormat("llama", llama.read, (llama.TAG,))
MISTRAL = ToolFormat("mistral", mistral.read, (mistral.CALLS, mistral.ARGUMENTS, mistral.CALL_ID))
FORMATS = (HERMES, LLAMA, MISTRAL)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the answers of a checkpoint are to be read."""

    tools: ToolFormat | None
    """None: its template has no place for tools, or writes calls in a form that is not known here."""
    thinks: Marks | None
    """None: it does not reason."""
    switches: frozenset[str]
    """The variables of the template that turn reasoning on and off: `enable_thinking`, `reasoning_effort`."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be special tokens, and is to be seen by the parser."""
        tools = () if self.tools is None else self.tools.marks
        return tools if self.thinks is None else (*tools, self.thinks.open, self.thinks.close)

    def parser(self, tool_names: Collection[str], prompt_end: str) -> Parser:
        """A parser for one answer.

        Args:
            tool_names: the tools that may be called; calls of others are text.
            prompt_end: the last words of the prompt: an answer may begin in the middle of reasoning.
        """
        read = self.tools.read if tool_names and self.tools is not None else _text
        if self.thinks is None:
            return Plain() if read is _text else Reading(read, tool_names.__contains__)
        marks, opened = self.thinks, self.thinks.opened_by(prompt_end)
        return Reading(lambda reading: reasoning.read(reading, marks, opened, read), tool_names.__contains__)


def format_of(template: str) -> ChatFormat:
    """The format of a checkpoint with this chat template (all of them, if it has several)."""
    thinks = next((marks for marks in reasoning.KINDS if marks.close in template), None)
    switches = frozenset(name for name in ("enable_thinking", "reasoning_effort") if name in template)
    return ChatFormat(_tool_format(template), thinks, switches)


def _tool_format(template: str) -> ToolFormat | None:
    if hermes.OPEN in template:
        others = ("<function=", "<arg_key>")  # Qwen3-Coder and GLM write XML between the same marks
        return None if any(mark in template for mark in others) else HERMES
    if mistral.CALLS in template:
        return MISTRAL
    if llama.TAG in template or '{"name": function name, "parameters"' in template:
        return LLAMA
    return None


def _text(reading: Reading) -> Reader[None]:
    while character := (yield):
        reading.say(character)
