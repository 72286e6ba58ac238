"""What the dialects that chat have in common: a conversation becomes a prompt, and an answer is taken apart.

    messages, tools ──chat template──> prompt ──engine──> text ──parser──> reasoning, text, calls of tools

Calls that must be, or must validate, are seen to by a grammar; other calls are what the model writes of itself.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine.assembler import CompletionDelta
from penstock.engine.client import Accepted
from penstock.errors import InvalidRequestError
from penstock.parsers.formats import ChatFormat, Parser
from penstock.parsers.parts import Part, Piece, Reasoning, put_together
from penstock.parsers.tools import Tools
from penstock.request import CompletionOutput, SamplingParams, Structured
from penstock.server.body import in_words
from penstock.server.dialect import Call
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


class Parsers:
    """Takes the answers of one call apart, each by itself."""

    def __init__(self, new: Callable[[], Parser], tokenizer: Tokenizer, closing: str | None) -> None:
        """
        Args:
            new: a parser that has read nothing.
            closing: the mark after which reasoning has ended; None if the model does not reason.
        """
        self._new = new
        self._tokenizer = tokenizer
        self._closing = closing
        self._parsers: dict[int, Parser] = {}

    def feed(self, delta: CompletionDelta) -> list[Piece]:
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
        thoughts = [part.text for part in self.parts(answer) if isinstance(part, Reasoning)]
        if not thoughts or self._closing is None:
            return 0
        if self._closing not in self._tokenizer.decode(answer.token_ids, skip_special_tokens=False):
            return len(answer.token_ids)
        closing = self._tokenizer.backend.token_to_id(self._closing)
        if closing in answer.token_ids:
            return answer.token_ids.index(closing) + 1
        return len(self._tokenizer.encode("".join(thoughts), add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation that is ready to be answered."""

    token_ids: list[int]
    params: SamplingParams
    parsers: Parsers
    guarded: bool
    """Whether a grammar sees to its calls."""

    async def accept(self, call: Call, *, request_id: str, priority: int | None) -> Accepted:
        """Check it; nothing runs yet.

        Raises:
            InvalidRequestError: the engine could not serve it.
        """
        with in_words({"structured": "tools"} if self.guarded else {}):
            return await call.accept(self.token_ids, self.params, request_id=request_id, priority=priority)


async def prepare(call: Call, conversation: Conversation, params: SamplingParams) -> Prepared:
    """Make a conversation's prompt, and settle how its answers are to be read.

    Raises:
        InvalidRequestError: the chat template refuses it, or tools do not go with the model or with the parameters.
    """
    known, tokenizer, tools = call.chat_format, call.need_tokenizer(), conversation.tools
    told = conversation.told_tools(known)
    if told and params.structured is not None:
        raise InvalidRequestError("tools and a form for the whole answer exclude each other: leave one out", "tools")
    token_ids = await call.engine.encode_chat(
        conversation.messages, tools=told, prefill=conversation.prefill, **conversation.variables
    )
    prompt_end = tokenizer.decode(token_ids[-_MARK_TOKENS:], skip_special_tokens=False) if known.thinks else ""
    marks = [tokenizer.special_token(mark) for mark in known.marks] if tools.offered or known.thinks else []
    params = replace(
        params,
        shown_special_tokens=[token for token in marks if token is not None],
        structured=_form(known, tools, params.structured, prompt_end, lambda mark: _in_lark(tokenizer, mark)),
    )
    names = {function.name for function in tools.callable}
    closing = None if known.thinks is None else known.thinks.close
    parsers = Parsers(lambda: known.parser(names, prompt_end), tokenizer, closing)
    return Prepared(token_ids, params, parsers, guarded=tools.guarded)


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
