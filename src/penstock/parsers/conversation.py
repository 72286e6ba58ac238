"""A conversation with tools: the template's input, the grammar of its answers, and their parsing.

    messages, tools ──chat template──> prompt ──engine──> text ──parser──> reasoning, text, tool calls

A grammar enforces calls that are required or must validate; the model decides about others. `format_of` detects the
format from the chat template, which renders the calls of earlier turns, or describes calls to the model, with the tags
that the model was trained to write.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any, Protocol

from penstock.api.request import CompletionOutput, FinishReason
from penstock.api.sampling_params import JsonRegions, SamplingParams, Structured
from penstock.api.tools import Function, Tools
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.parsers import (
    deepseek,
    gemma,
    gemma_grammar,
    harmony,
    hermes,
    llama,
    mistral,
    reasoning,
    tagged,
    tagged_grammar,
)
from penstock.parsers.described_tools import describe
from penstock.parsers.grammar import Grammar, Mark, calls, lark, thought
from penstock.parsers.history import REASONING, clean_messages, reasoning_fields_of, switches_of
from penstock.parsers.parts import Part, Piece, Reasoning, Text, put_together
from penstock.parsers.reading import Reader, Reading
from penstock.parsers.reasoning import Marks
from penstock.text.tokenizer import Tokenizer


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
class Messages:
    """A format whose answers are messages, each one reasoning, text or a call."""

    reasoning: Callable[[Mark], str]
    """The rule `before`: reasoning that precedes text or calls."""
    header: Callable[[Mark], str]
    """The header of the message that holds the answer's text."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls."""

    name: str
    read: Callable[[Reading], Reader[None]]
    grammar: Grammar
    marks: tuple[str, ...]
    """Tags that may be special tokens, which the detokenizer hides by default."""
    messages: Messages | None = None
    """None: `read` parses the text after the reasoning."""


HERMES = ToolFormat("hermes", hermes.read, hermes.GRAMMAR, (hermes.OPEN, hermes.CLOSE))
LLAMA = ToolFormat("llama", llama.read, llama.GRAMMAR, (llama.TAG,))
_MARKS_OF_MISTRAL = (mistral.CALLS, mistral.ARGUMENTS, mistral.CALL_ID)
MISTRAL_LIST = ToolFormat("mistral_list", mistral.read, mistral.LIST, _MARKS_OF_MISTRAL)
MISTRAL_BY_NAME = ToolFormat("mistral_by_name", mistral.read, mistral.BY_NAME, _MARKS_OF_MISTRAL)
_MARKS_OF_DEEPSEEK = (
    *(deepseek.CALLS, deepseek.CALLS_END),
    *(deepseek.CALL, deepseek.SEPARATOR, deepseek.CALL_END),
)
DEEPSEEK_FENCED = ToolFormat("deepseek_fenced", deepseek.read, deepseek.FENCED, _MARKS_OF_DEEPSEEK)
DEEPSEEK = ToolFormat("deepseek", deepseek.read, deepseek.PLAIN, _MARKS_OF_DEEPSEEK)
QWEN_TAGS = ToolFormat("qwen_tags", tagged.reader(tagged.QWEN), tagged_grammar.QWEN, (tagged.OPEN, tagged.CLOSE))
_MARKS_OF_GLM = (
    *(tagged.OPEN, tagged.CLOSE, tagged.GLM.before_key, tagged.GLM.after_key),
    *(tagged.GLM.before_value, tagged.GLM.after_value),
)
GLM = ToolFormat("glm", tagged.reader(tagged.GLM), tagged_grammar.GLM, _MARKS_OF_GLM)
GEMMA = ToolFormat("gemma", gemma.read, gemma_grammar.GRAMMAR, (gemma.OPEN, gemma.CLOSE, gemma.QUOTE))
_MESSAGES = Messages(harmony.thoughts, harmony.header)
HARMONY = ToolFormat("harmony", harmony.read, harmony.GRAMMAR, harmony.MARKS, _MESSAGES)
FORMATS = (HERMES, LLAMA, MISTRAL_LIST, MISTRAL_BY_NAME, DEEPSEEK_FENCED, DEEPSEEK, QWEN_TAGS, GLM, GEMMA, HARMONY)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Formats of a checkpoint's answers, and their parser."""

    tools: ToolFormat
    thinks: Marks | None
    """None: the model does not reason."""
    switches: frozenset[str]
    """The template's variables that control reasoning: `enable_thinking`, `thinking`, `reasoning_effort`."""
    reasoning_fields: tuple[str, ...] = (REASONING,)
    """Names under which the template reads the reasoning of earlier turns."""
    shows_tools: bool = True
    """Whether the template renders tools, calls and results; if not, `described_tools` does."""
    takes_images: bool = False
    """Whether the model takes images beside text."""
    takes_sounds: bool = False
    """Whether the model takes sounds beside text."""
    encoder_note: str = ""
    """What errors about sounds say of the checkpoint's audio encoder."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Tags that may be special tokens and that the parser must see."""
        tools = self.tools.marks
        return tools if self.thinks is None else (*tools, self.thinks.open, self.thinks.close)

    def parser(self, functions: Collection[Function], prompt_end: str) -> Parser:
        """A parser for one answer.

        Args:
            functions: tools that the answer may call; without any, nothing is parsed as a call.
            prompt_end: the end of the prompt, which may open reasoning.
        """
        if self.messages is not None:
            return Reading(self.tools.read, functions)
        read = self.tools.read if functions else _text
        if self.thinks is None:
            return Plain() if read is _text else Reading(read, functions)
        marks, opened = self.thinks, self.thinks.opened_by(prompt_end)
        return Reading(lambda reading: reasoning.read(reading, marks, opened, read), functions)

    def effort(self, wanted: str) -> dict[str, Any] | None:
        """The template's variables for a reasoning effort: "none" turns reasoning off, "on" turns it on.

        None if the effort has no effect on this model.
        """
        if wanted != "on" and wanted != "none" and "reasoning_effort" in self.switches:
            return {"reasoning_effort": wanted}
        for name in ("enable_thinking", "thinking"):
            if name in self.switches:
                return {name: wanted != "none"}
        reasons = self.thinks is not None
        return {} if reasons == (wanted != "none") and wanted in ("on", "none") else None

    def grammar(self, tools: Tools, mark: Mark) -> str:
        """The Lark grammar of answers that call tools as `tools` requires."""
        return lark(self.tools.grammar, tools, mark)

    def calls(self, tools: Tools, mark: Mark) -> str:
        """The Lark rule `calls`: answers that consist of calls."""
        return calls(self.tools.grammar, tools, mark)

    @property
    def marks_calls(self) -> bool:
        """Whether a tag distinguishes calls from other answers that begin with a brace."""
        return self.tools.grammar.documents is not None

    @property
    def reasons(self) -> bool:
        """Whether the model can reason before it answers."""
        return self.thinks is not None or self.messages is not None

    @property
    def messages(self) -> Messages | None:
        """The format of answers as messages; None if they are text after reasoning."""
        return self.tools.messages

    def reasoning_rule(self, prompt_end: str, mark: Mark) -> str:
        """The Lark rule `before`: reasoning that precedes an answer; empty without reasoning."""
        if self.messages is not None:
            return self.messages.reasoning(mark)
        if self.thinks is None:
            return ""
        return thought(self.thinks, self.thinks.opened_by(prompt_end), mark)

    def documents(self, calls: Sequence[Function], form: bool, prompt_end: str, mark: Mark) -> JsonRegions:
        """The positions of JSON in an answer with a grammar of calls, of a requested structure, or of either.

        Args:
            calls: functions that the answer may call.
            form: whether the answer may be one JSON document.
        """
        documents = self._documents_of_text(prompt_end, mark)
        if not calls:
            return documents
        grammar = self.tools.grammar
        if grammar.documents is None:
            return replace(documents, brackets=documents.brackets if form else "{", key=grammar.key)
        beginning = documents.after if form else ()
        return replace(documents, after=(*beginning, *grammar.documents(calls, mark)), key=grammar.key)

    def _documents_of_text(self, prompt_end: str, mark: Mark) -> JsonRegions:
        """The position of the JSON in an answer that is one document."""
        thinks = self.thinks
        if self.messages is not None:
            return JsonRegions(after=(self.messages.header(mark),))
        return JsonRegions(
            thinking=None if thinks is None else (mark(thinks.open), mark(thinks.close)),
            thinks_first=thinks is not None and thinks.opened_by(prompt_end),
        )


def format_of(template: str) -> ChatFormat:
    """Detect a checkpoint's format from its chat template (from the text of all, if it has several)."""
    thinks = next((marks for marks in reasoning.KINDS if marks.shown_by(template)), None)
    tools = _tool_format(template)
    fields = reasoning_fields_of(template)
    return ChatFormat(tools or HERMES, thinks, switches_of(template), fields, shows_tools=tools is not None)


def _tool_format(template: str) -> ToolFormat | None:
    if hermes.OPEN in template:
        by_tag = {tagged.QWEN.before_name: QWEN_TAGS, tagged.GLM.before_key: GLM}
        return next((format for tag, format in by_tag.items() if tag in template), HERMES)
    if mistral.CALLS in template:
        return MISTRAL_BY_NAME if mistral.ARGUMENTS in template else MISTRAL_LIST
    if harmony.CHANNEL in template:
        return HARMONY
    if gemma.OPEN in template:
        return GEMMA
    if deepseek.CALLS in template:
        return DEEPSEEK_FENCED if "```json" in template else DEEPSEEK
    if llama.TAG in template or '{"name": function name, "parameters"' in template:
        return LLAMA
    return None


def _text(reading: Reading) -> Reader[None]:
    while character := (yield):
        reading.emit_text(character)


_MARK_TOKENS = 8
"""Number of tokens at the end of the prompt that are searched for a tag that opens reasoning."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A caller's conversation, as input of the chat template."""

    messages: list[dict[str, Any]]
    tools: Tools
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    prefill: str = ""
    """The beginning of the answer, given by the caller (prefill)."""
    ignored: tuple[str, ...] = ()
    """Fields of the body without effect on this model."""

    def template_input(self, known: ChatFormat) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages and the tools as the chat template receives them.

        The tools are None if there are none; or if the template does not render them, so that the messages do.
        """
        messages = clean_messages(self.messages, known.reasoning_fields)
        tools = [function.as_template_sees_it() for function in self.tools.offered]
        if known.shows_tools:
            return messages, tools or None
        return describe(messages, tools), None


class Delta(Protocol):
    """New text of one choice."""

    index: int
    text: str
    finish_reason: FinishReason | None


class Parsers:
    """The parsers of a prompt's choices."""

    def __init__(self, known: ChatFormat, tokenizer: Tokenizer, token_ids: Sequence[int], tools: Tools) -> None:
        """
        Args:
            token_ids: the prompt.
            tools: the offered tools.
        """
        self._known = known
        self._tokenizer = tokenizer
        prompt_end = "" if known.thinks is None else _end(tokenizer, token_ids)
        self._new_parser = partial(known.parser, tools.callable, prompt_end)
        self._parsers: dict[int, Parser] = {}

    def feed_text(self, delta: Delta) -> list[Piece]:
        """Parses a stream's delta; returns the new pieces."""
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._new_parser()
        parser = self._parsers[delta.index]
        pieces = parser.feed_text(delta.text)
        return pieces if delta.finish_reason is None else [*pieces, *parser.finish()]

    def parts(self, answer: CompletionOutput) -> list[Part]:
        """Parses a whole answer."""
        parser = self._new_parser()
        return put_together([*parser.feed_text(answer.text), *parser.finish()])

    def reasoning_tokens(self, answer: CompletionOutput) -> int:
        """Number of reasoning tokens of an answer, tags included."""
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


def constrain(
    params: SamplingParams, known: ChatFormat, tokenizer: Tokenizer, token_ids: Sequence[int], tools: Tools
) -> SamplingParams:
    """Adds the grammar that enforces calls, and the special tokens that the parser must see, to the parameters.

    Raises:
        InvalidRequestError: calls and the structured form are ambiguous; `param` is "tools".
    """
    marks = [tokenizer.special_token(mark) for mark in known.marks] if tools.offered or known.thinks else []
    shown, structured = (*params.shown_special_tokens, *(token for token in marks if token is not None)), None
    if params.structured is not None or tools.enforced:
        prompt_end = _end(tokenizer, token_ids)
        structured = _structured(known, tools, params.structured, prompt_end, partial(_in_lark, tokenizer))
    if not marks and structured is None:
        return params
    return replace(params, shown_special_tokens=shown, structured=structured)


def _end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids[-_MARK_TOKENS:], skip_special_tokens=False)


def _structured(
    known: ChatFormat, tools: Tools, asked: Structured | None, prompt_end: str, mark: Callable[[str], str]
) -> Structured:
    """The grammar of the part after the reasoning: tool calls, the requested structure, or either."""
    before = known.reasoning_rule(prompt_end, mark)
    if asked is not None and tools.choice != "required":
        header = "" if known.messages is None else known.messages.header(mark)
        return _form_or_calls(known, tools, replace(asked, before=before, header=header), prompt_end, mark)
    documents = known.documents(tools.callable, False, prompt_end, mark)
    return replace(Structured.grammar(known.grammar(tools, mark)), before=before, documents=documents)


def _form_or_calls(
    known: ChatFormat, tools: Tools, form: Structured, prompt_end: str, mark: Callable[[str], str]
) -> Structured:
    """The requested structure, with tool calls as an alternative where there are tools."""
    is_json = form.kind in ("json_schema", "json_object")
    if not tools.offered:
        place = None if form.kind == "grammar" else known.documents((), True, prompt_end, mark)
        return replace(form, documents=place)
    if not is_json and not known.marks_calls:
        raise InvalidRequestError(
            "this model's tool calls are JSON without a tag, so beside tools an answer can only have a form of "
            "JSON: ask for one, or leave tools out",
            "tools",
        )
    documents = known.documents(tools.callable, is_json, prompt_end, mark)
    return replace(form, calls=known.calls(tools, mark), documents=documents)


def _in_lark(tokenizer: Tokenizer, mark: str) -> str:
    """A tag in Lark notation. A special token is named by its id, since no text matches it."""
    token_id = tokenizer.special_token(mark)
    return json.dumps(mark) if token_id is None else f"<[{token_id}]>"
