"""Compiles a request's schema, regular expression or grammar for llguidance, or explains why it cannot.

    JSON schema ──json_schema.rewrite──> schema ─┐
    Lark grammar, with %json inside ─────────────┼──> llguidance ──> Grammar
    regular expression, choices ─────────────────┘    unique keys and items ──> Uniqueness

The answer may begin with reasoning, then with the header of its message; tool calls may take the place of the rest.

A schema that is enforced only if possible (`%json_if_possible`, of a tool that is not strict) is dropped if it cannot
be enforced or compiled. If the whole grammar still does not compile, all such schemas are dropped.

JSON is written in one line, with a space after each colon and comma, as `json.dumps` and chat templates write it. With
free whitespace fewer tokens could be forced, and a small model might never stop writing blanks.
"""

import json

from llguidance import LLMatcher, LLParserLimits

from penstock.api.sampling_params import JsonRegions, Structured
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.structured.form_limits import check_size, refusal
from penstock.structured.json_schema.document import SchemaError
from penstock.structured.json_schema.rewrite import Rewritten, rewrite
from penstock.structured.json_schema.spots import joined
from penstock.structured.lark import Keep, has_optional_schemas, rewrite_schemas
from penstock.structured.scanner import Scanner
from penstock.structured.uniqueness import Uniqueness
from penstock.structured.vocabulary import Vocabulary

LIMITS = LLParserLimits(max_items_in_row=4096, verbose_errors=False)
"""llguidance's limits for one mask; exceeding them fails only that sequence."""
_ANYWHERE = (
    "that no key or item comes twice is held where the whole answer is JSON. Objects in %json need "
    '"additionalProperties": false, and lists cannot have uniqueItems'
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """The compiled grammar of a request."""

    start: LLMatcher
    """The matcher in its initial state, copied for each sequence."""
    uniqueness: Uniqueness | None
    """None if the grammar itself excludes repeated keys and items."""


def compile_grammar(vocabulary: Vocabulary, structured: Structured) -> Grammar:
    """
    Compile a request's grammar. Some schemas of a few hundred bytes take seconds of one core, a few take hours.

    Raises:
        InvalidRequestError: the grammar is too large, malformed, unsatisfiable, or uses a feature that llguidance does
            not support; the message says which.
    """
    check_size(structured)
    if not has_optional_schemas(structured.text) and not has_optional_schemas(structured.calls):
        return _compile(vocabulary, structured, lambda schema: True)
    return (
        # With all optional schemas; with those that compile alone; with none.
        _compile_if_possible(vocabulary, structured, lambda schema: True)
        or _compile_if_possible(vocabulary, structured, lambda schema: _compiles(vocabulary, schema))
        or _compile(vocabulary, structured, lambda schema: False)
    )


def _compiles(vocabulary: Vocabulary, schema: Rewritten) -> bool:
    source = LLMatcher.grammar_from_json_schema(schema.schema)
    return not LLMatcher(vocabulary.library, source, log_level=0, limits=LIMITS).is_error()


def _compile_if_possible(vocabulary: Vocabulary, structured: Structured, keep: Keep) -> Grammar | None:
    try:
        return _compile(vocabulary, structured, keep)
    except InvalidRequestError:
        return None


def _compile(vocabulary: Vocabulary, structured: Structured, keep: Keep) -> Grammar:
    """
    Args:
        keep: whether a schema that is enforced only if possible is kept.

    Raises:
        InvalidRequestError: as `compile_grammar`.
    """
    try:
        form, schemas = _form(structured, keep)
        calls, schemas_of_calls = rewrite_schemas(structured.calls, keep)
        source = _within(structured, form, calls)
        matcher = LLMatcher(vocabulary.library, source, log_level=0, limits=LIMITS)
    except (SchemaError, ValueError, RecursionError) as error:
        raise refusal(structured, str(error)) from error
    if matcher.is_error():
        raise refusal(structured, matcher.get_error())
    return Grammar(matcher, _uniqueness(vocabulary, structured, schemas, schemas_of_calls))


def _uniqueness(
    vocabulary: Vocabulary, structured: Structured, schemas: list[Rewritten], schemas_of_calls: list[Rewritten]
) -> Uniqueness | None:
    """
    Raises:
        InvalidRequestError: the position of the JSON in the answer is unknown.
    """
    documents = structured.documents
    if structured.kind == "grammar" and any(map(_may_repeat, schemas)) and (documents is None or structured.calls):
        raise refusal(structured, _ANYWHERE)
    if not any(map(_may_repeat, schemas + schemas_of_calls)):
        return None
    documents = documents or JsonRegions()
    if structured.kind == "grammar" and not structured.calls:
        schemas, schemas_of_calls = [], schemas
    spots = joined([schema.spots for schema in schemas], [schema.spots for schema in schemas_of_calls], documents.key)
    few = bool(spots) or any(schema.few_keys for schema in schemas + schemas_of_calls)
    return Uniqueness(Scanner(documents, spots), vocabulary.pieces, few)


def _may_repeat(schema: Rewritten) -> bool:
    return schema.repeats_keys or bool(schema.spots)


def _form(structured: Structured, keep: Keep) -> tuple[str, list[Rewritten]]:
    """The grammar in llguidance's notation, and its schemas."""
    text = structured.text
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(text), []
    if structured.kind == "grammar":
        text, schemas = rewrite_schemas(text, keep)
        return LLMatcher.grammar_from_lark(text), schemas
    if structured.kind == "choice":
        # A terminal: each alternative of a rule would take one of the items that the parser has for a position.
        one_of = " | ".join(map(_quoted, structured.choices))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {one_of}"), []
    schema = rewrite('{"type": "object"}' if structured.kind == "json_object" else text)
    return LLMatcher.grammar_from_json_schema(schema.schema), [schema]


def _quoted(text: str) -> str:
    """A string literal of Lark: JSON's, except for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _within(structured: Structured, form: str, calls: str) -> str:
    """The grammar preceded by reasoning and header, with the tool calls as an alternative."""
    before, header = structured.before, structured.header
    if not (before or header or calls):
        return form
    parts = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    start = f"{'before' if before else ''} ({'calls | ' if calls else ''}{header} @form)"
    first = {"lark_grammar": f"start: {start}\n{before}\n{calls}"}
    return json.dumps({"grammars": [first, {**parts[0], "name": "form"}]})
