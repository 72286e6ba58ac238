"""A conversation with tools: the template's input, the grammar of its answers, and their parsing.

    messages, tools ──chat template──> prompt ──engine──> text ──parser──> reasoning, text, calls of tools

A grammar enforces calls that are required or must validate; other calls are up to the model.
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
"""Tokens at the prompt's end that are searched for a mark that opens reasoning."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A caller's conversation, as input of the chat template."""

    messages: list[dict[str, Any]]
    tools: Tools
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    prefill: str = ""
    """The start of the answer, given by the caller."""

    def template_tools(self, known: ChatFormat) -> list[dict[str, Any]] | None:
        """The tools as the chat template receives them; None without tools.

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
    """New text of one of the answers to a prompt."""

    index: int
    text: str
    finish_reason: FinishReason | None


class Parsers:
    """Parsers of the answers to one prompt."""

    def __init__(self, known: ChatFormat, tokenizer: Tokenizer, token_ids: Sequence[int], tools: Tools) -> None:
        """
        Args:
            token_ids: the prompt.
            tools: those offered; calls of others are text.
        """
        self._known = known
        self._tokenizer = tokenizer
        self._names = {function.name for function in tools.callable}
        self._prompt_end = _end(tokenizer, token_ids)
        self._parsers: dict[int, Parser] = {}

    def feed_text(self, delta: Delta) -> list[Piece]:
        """Parses a stream's delta; returns the new pieces."""
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._new()
        parser = self._parsers[delta.index]
        pieces = parser.feed_text(delta.text)
        return pieces if delta.finish_reason is None else [*pieces, *parser.finish()]

    def parts(self, answer: CompletionOutput) -> list[Part]:
        """Parses a whole answer."""
        parser = self._new()
        return put_together([*parser.feed_text(answer.text), *parser.finish()])

    def reasoning_tokens(self, answer: CompletionOutput) -> int:
        """Number of an answer's tokens that are reasoning, marks included."""
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


def constrain(
    params: SamplingParams, known: ChatFormat, tokenizer: Tokenizer, token_ids: Sequence[int], tools: Tools
) -> SamplingParams:
    """Adds the grammar that enforces calls, and the special tokens that the parser must see, to the parameters.

    Raises:
        InvalidRequestError: calls could not be told from the structured form; `param` is "tools".
    """
    marks = [tokenizer.special_token(mark) for mark in known.marks] if tools.offered or known.thinks else []
    return replace(
        params,
        shown_special_tokens=[token for token in marks if token is not None],
        structured=_structured(
            known, tools, params.structured, _end(tokenizer, token_ids), lambda mark: _in_lark(tokenizer, mark)
        ),
    )


def _end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids[-_MARK_TOKENS:], skip_special_tokens=False)


def _structured(
    known: ChatFormat, tools: Tools, asked: Structured | None, prompt_end: str, mark: Callable[[str], str]
) -> Structured | None:
    """The grammar that enforces calls, or the structure that was asked for, or either; after the reasoning."""
    before = known.reasoning_rule(prompt_end, mark)
    if asked is not None and tools.choice != "required":
        return _form_or_calls(known, tools, replace(asked, before=before), prompt_end, mark)
    if not tools.guarded:
        return None
    documents = known.documents(True, False, prompt_end, mark)
    return replace(Structured.grammar(known.grammar(tools, mark)), before=before, documents=documents)


def _form_or_calls(
    known: ChatFormat, tools: Tools, form: Structured, prompt_end: str, mark: Callable[[str], str]
) -> Structured:
    """A form, or calls in its place where there are tools."""
    is_json = form.kind in ("json_schema", "json_object")
    if not tools.offered:
        place = None if form.kind == "grammar" else known.documents(False, True, prompt_end, mark)
        return replace(form, documents=place)
    if not is_json and not known.marks_calls:
        raise InvalidRequestError(
            "this model's calls of tools are JSON without a mark, so beside tools an answer can only have a form of "
            "JSON: ask for one, or leave tools out",
            "tools",
        )
    documents = known.documents(True, is_json, prompt_end, mark)
    return replace(form, calls=known.calls(tools, mark), documents=documents)


def _in_lark(tokenizer: Tokenizer, mark: str) -> str:
    """A mark in Lark notation; a special token by its id, as no text matches it."""
    token_id = tokenizer.special_token(mark)
    return json.dumps(mark) if token_id is None else f"<[{token_id}]>"
