"""The format of a checkpoint's answers, detected from its chat template.

A template renders the calls of earlier turns, or instructs the model how to write them; its marks are those that the
model was trained to write.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.errors import InvalidRequestError
from penstock.parsers import hermes, llama, mistral, reasoning
from penstock.parsers.grammar import Grammar, Mark, calls, lark, thought
from penstock.parsers.parts import Piece, Text
from penstock.parsers.reading import Reader, Reading
from penstock.parsers.reasoning import Marks
from penstock.parsers.tools import Tools
from penstock.sampling_params import Documents


class Parser(Protocol):
    """An incremental parser of one answer."""

    def feed_text(self, text: str) -> list[Piece]:
        """Parses more text; returns the new pieces."""

    def finish(self) -> list[Piece]:
        """Parses the end of the answer; returns the last pieces."""


class Plain:
    """The parser of answers without reasoning or calls."""

    def feed_text(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A notation of tool calls."""

    name: str
    read: Callable[[Reading], Reader[None]]
    grammar: Grammar
    marks: tuple[str, ...]
    """Marks that may be special tokens, which the detokenizer hides by default."""


HERMES = ToolFormat("hermes", hermes.read, hermes.GRAMMAR, (hermes.OPEN, hermes.CLOSE))
LLAMA = ToolFormat("llama", llama.read, llama.GRAMMAR, (llama.TAG,))
_MARKS_OF_MISTRAL = (mistral.CALLS, mistral.ARGUMENTS, mistral.CALL_ID)
MISTRAL_LIST = ToolFormat("mistral_list", mistral.read, mistral.LIST, _MARKS_OF_MISTRAL)
MISTRAL_BY_NAME = ToolFormat("mistral_by_name", mistral.read, mistral.BY_NAME, _MARKS_OF_MISTRAL)
FORMATS = (HERMES, LLAMA, MISTRAL_LIST, MISTRAL_BY_NAME)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How to parse the answers of a checkpoint."""

    tools: ToolFormat | None
    """None: the template has no tools, or an unknown notation of calls."""
    thinks: Marks | None
    """None: the model does not reason."""
    switches: frozenset[str]
    """The template's variables that control reasoning: `enable_thinking`, `reasoning_effort`."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that may be special tokens and that the parser must see."""
        tools = () if self.tools is None else self.tools.marks
        return tools if self.thinks is None else (*tools, self.thinks.open, self.thinks.close)

    def parser(self, tool_names: Collection[str], prompt_end: str) -> Parser:
        """A parser for one answer.

        Args:
            tool_names: the tools that may be called; calls of others are text.
            prompt_end: the end of the prompt, which may open reasoning.
        """
        read = self.tools.read if tool_names and self.tools is not None else _text
        if self.thinks is None:
            return Plain() if read is _text else Reading(read, tool_names.__contains__)
        marks, opened = self.thinks, self.thinks.opened_by(prompt_end)
        return Reading(lambda reading: reasoning.read(reading, marks, opened, read), tool_names.__contains__)

    def think(self, wanted: bool) -> dict[str, Any]:
        """The template's variables that turn reasoning on or off.

        Raises:
            InvalidRequestError: the model has no such control; `param` is "reasoning_effort".
        """
        if "enable_thinking" in self.switches:
            return {"enable_thinking": wanted}
        if wanted == (self.thinks is not None):
            return {}
        words = "this model does not reason" if wanted else "this model's reasoning cannot be turned off"
        raise InvalidRequestError(words, "reasoning_effort")

    def effort(self, wanted: str) -> dict[str, Any]:
        """The template's variables for an effort of reasoning; "none" turns it off.

        Raises:
            InvalidRequestError: the model has no such control; `param` is "reasoning_effort".
        """
        if wanted == "none":
            return self.think(False)
        if "reasoning_effort" in self.switches:
            return {"reasoning_effort": wanted}
        words = "this model's chat template knows no reasoning_effort: leave it out"
        raise InvalidRequestError(words, "reasoning_effort")

    def grammar(self, tools: Tools, mark: Mark) -> str:
        """The grammar, in Lark notation, of answers that call tools as `tools` demands. Requires a format of calls."""
        assert self.tools is not None
        return lark(self.tools.grammar, tools, mark)

    def calls(self, tools: Tools, mark: Mark) -> str:
        """The rule `calls`, in Lark notation, of answers that are calls. Requires a format of calls."""
        assert self.tools is not None
        return calls(self.tools.grammar, tools, mark)

    @property
    def marks_calls(self) -> bool:
        """Whether a mark tells an answer that is calls from another that begins with a brace."""
        return self.tools is not None and self.tools.grammar.document is not None

    def reasoning_rule(self, prompt_end: str, mark: Mark) -> str:
        """The rule `before`, in Lark notation, of reasoning before an answer; empty without reasoning."""
        if self.thinks is None:
            return ""
        return thought(self.thinks.open, self.thinks.close, self.thinks.opened_by(prompt_end), mark)

    def documents(self, calls: bool, form: bool, prompt_end: str, mark: Mark) -> Documents:
        """Where the JSON is in an answer that the grammar of calls, of a form, or of either, enforces.

        Args:
            calls: whether it may be calls.
            form: whether it may be one document of JSON.
        """
        thinks = self.thinks
        documents = Documents(
            thinking=None if thinks is None else (mark(thinks.open), mark(thinks.close)),
            thinks_first=thinks is not None and thinks.opened_by(prompt_end),
        )
        if not calls or self.tools is None:
            return documents
        grammar = self.tools.grammar
        if grammar.document is None:
            return replace(documents, brackets=documents.brackets if form else "{", key=grammar.key)
        beginning = documents.after if form else ()
        return replace(documents, after=(*beginning, mark(grammar.document)), key=grammar.key)


def format_of(template: str) -> ChatFormat:
    """The format of a checkpoint, by its chat template (the text of all, if it has several)."""
    thinks = next((marks for marks in reasoning.KINDS if marks.close in template), None)
    switches = frozenset(name for name in ("enable_thinking", "reasoning_effort") if name in template)
    return ChatFormat(_tool_format(template), thinks, switches)


def _tool_format(template: str) -> ToolFormat | None:
    if hermes.OPEN in template:
        others = ("<function=", "<arg_key>")  # Qwen3-Coder and GLM write XML between the same marks
        return None if any(mark in template for mark in others) else HERMES
    if mistral.CALLS in template:
        return MISTRAL_BY_NAME if mistral.ARGUMENTS in template else MISTRAL_LIST
    if llama.TAG in template or '{"name": function name, "parameters"' in template:
        return LLAMA
    return None


def _text(reading: Reading) -> Reader[None]:
    while character := (yield):
        reading.say(character)
