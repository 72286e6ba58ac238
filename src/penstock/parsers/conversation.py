"""A conversation with tools: what of it the template is told, how its answers are sampled, and how they are read.

    messages, tools ──chat template──> prompt ──engine──> text ──parser──> reasoning, text, calls of tools

Calls that must be, or must validate, are seen to by a grammar; other calls are what the model writes of itself.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.errors import InvalidRequestError
from penstock.parsers.formats import ChatFormat, Parser
from penstock.parsers.parts import Part, Piece, Reasoning, put_together
from penstock.parsers.tools import Tools
from penstock.request import CompletionOutput, FinishReason
from penstock.sampling_params import SamplingParams, Structured
from penstock.tokenizer import Tokenizer

_MARK_TOKENS = 8
"""So many tokens at the prompt's end are looked at for a mark that opens reasoning."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a caller asks, in the words of chat templates."""

    messages: list[dict[str, Any]]
    tools: Tools
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The template's own."""
    prefill: str = ""
    """How the answer begins."""

    def told_tools(self, known: ChatFormat) -> list[dict[str, Any]] | None:
        """The tools that the chat template is told of.

        Raises:
            InvalidRequestError: there are some, but the model has no form of calls that is known here.
        """
        if self.tools.offered and known.tools is None:
            raise InvalidRequestError(
                "the model's chat template has no form of tool calls that is known here (those of Hermes and Qwen, of "
                "Llama 3 and of Mistral are): leave tools out",
                "tools",
            )
        return [function.as_template_sees_it() for function in self.tools.offered] or None


class Delta(Protocol):
    """What is new of one of the answers to a prompt."""

    index: int
    text: str
    finish_reason: FinishReason | None


class Parsers:
    """Takes the answers to one prompt apart, each by itself."""

    def __init__(self, known: ChatFormat, tokenizer: Tokenizer, token_ids: Sequence[int], tools: Tools) -> None:
        """
        Args:
            token_ids: the prompt.
            tools: that it offers; calls of others are text.
        """
        self._known = known
        self._tokenizer = tokenizer
        self._names = {function.name for function in tools.callable}
        self._prompt_end = _end(tokenizer, token_ids)
        self._parsers: dict[int, Parser] = {}

    def feed(self, delta: Delta) -> list[Piece]:
        """What a stream's delta makes known."""
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._new()
        parser = self._parsers[delta.index]
        pieces = parser.feed(delta.text)
        return pieces if delta.finish_reason is None else [*pieces, *parser.finish()]

    def parts(self, answer: CompletionOutput) -> list[Part]:
        """A whole answer."""
        parser = self._new()
        return put_together([*parser.feed(answer.text), *parser.finish()])

    def reasoning_tokens(self, answer: CompletionOutput) -> int:
        """How many of an answer's tokens are reasoning and its marks."""
        marks, token_ids = self._known.thinks, answer.token_ids
        if marks is None:
            return 0
        thoughts = [part.text for part in self.parts(answer) if isinstance(part, Reasoning)]
        if not thoughts:
            return 0
        if marks.close not in self._tokenizer.decode(token_ids, skip_special_tokens=False):
            return len(token_ids)
        closing = self._tokenizer.backend.token_to_id(marks.close)
        if closing in token_ids:
            return token_ids.index(closing) + 1
        return len(self._tokenizer.encode("".join(thoughts), add_special_tokens=False))

    def _new(self) -> Parser:
        return self._known.parser(self._names, self._prompt_end)


def guided(
    params: SamplingParams, known: ChatFormat, tokenizer: Tokenizer, token_ids: Sequence[int], tools: Tools
) -> SamplingParams:
    """The parameters with which a conversation's answers are what they must be, and can be read.

    Raises:
        InvalidRequestError: tools do not go with the form that is asked for; `param` is "tools".
    """
    if tools.offered and params.structured is not None:
        raise InvalidRequestError("tools and a form for the whole answer exclude each other: leave one out", "tools")
    marks = [tokenizer.special_token(mark) for mark in known.marks] if tools.offered or known.thinks else []
    return replace(
        params,
        shown_special_tokens=[token for token in marks if token is not None],
        structured=_form(
            known, tools, params.structured, _end(tokenizer, token_ids), lambda mark: _in_lark(tokenizer, mark)
        ),
    )


def _end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids[-_MARK_TOKENS:], skip_special_tokens=False)


def _form(
    known: ChatFormat, tools: Tools, asked: Structured | None, prompt_end: str, mark: Callable[[str], str]
) -> Structured | None:
    """The form of the answer, be it asked for or that of calls which must be as they must be."""
    form = Structured.grammar(known.grammar(tools, mark)) if tools.guarded else asked
    return None if form is None else replace(form, before=known.reasoning_rule(prompt_end, mark))


def _in_lark(tokenizer: Tokenizer, mark: str) -> str:
    """A mark as grammars write it: a special token by its id, which no text matches."""
    token_id = tokenizer.special_token(mark)
    return json.dumps(mark) if token_id is None else f"<[{token_id}]>"
