"""Lark grammars, for llguidance, that force well-formed tool calls.

If calls are forced, the answer consists of calls. Otherwise it is any text, but a call in it is complete, names an
offered tool and has valid arguments. With a requested structure, the answer is either calls or that structure.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.api.sampling_params import MAX_FORM_CHARACTERS, check_exact
from penstock.api.tools import Function, Tools
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.parsers.reasoning import Marks

Mark = Callable[[str], str]
"""A tag in a grammar: a special token, or its text."""

_MAX_ROOM = MAX_FORM_CHARACTERS // 2
"""Maximum characters of the rules of tools that are not strict; the arguments of further ones are not enforced."""
_REST = 2**12
"""Characters reserved for the rules of text and reasoning."""
TEXT = "TEXT: /(?s:.*)/"
_NOT_JSON = r"TEXT: /([^{\s](?s:.*))?/"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of a format's calls."""

    opening: str | None
    """The tag before a call; None if a call begins the answer."""
    item: Callable[[str, str, Mark], str]
    """The rule of one call, from its name and the rule of its arguments."""
    call: Callable[[str, str, Mark, bool], str]
    """The rule of all calls, from the rules of the opening and of one call, and whether several are allowed."""
    between: str | None
    """The separator of calls that each have an opening; None if there is one opening at most."""
    documents: Callable[[Sequence[Function], Mark], Sequence[str]] | None
    """Text that precedes the JSON of a tool call; None if the call starts with the JSON."""
    key: str = ""
    """The property of that JSON with the arguments; empty if the JSON is the arguments, or a part of them."""
    arguments: "Callable[[Function, int, bool, Mark], list[str]] | None" = None
    """Makes the rule `arguments_N` of function N from its index and whether arguments must validate; None: JSON.

    Raises InvalidRequestError if they must validate but the schema cannot be enforced; arguments of a function that is
    not strict are then unconstrained. Rules that several functions need have the same text, and are written once.
    """
    start: Callable[[Mark], list[str]] | None = None
    """The rule `start` of answers of text or calls, with the rules that it uses; None: text up to the tag of a call."""


def document_after(text: str) -> Callable[[Sequence[Function], Mark], Sequence[str]]:
    """`Grammar.documents` of a format in which the JSON of a call, or of a list of calls, follows this mark."""
    return lambda functions, mark: (mark(text),)


def json_call(key: str) -> Callable[[str, str, Mark], str]:
    """A call as {"name": ..., key: ...}."""

    def item(name: str, arguments: str, mark: Mark) -> str:
        # The lexemes of JSON schemas: a longer one would shut out a document that begins in the same way.
        before = ("{", '"name"', ": ", f'"{name}"', ", ", f'"{key}"', ": ")
        return f'{" ".join(map(json.dumps, before))} {arguments} "}}"'

    return item


def lark(grammar: Grammar, tools: Tools, mark: Mark) -> str:
    """The grammar of an answer, less the reasoning before it."""
    if tools.choice == "required":
        return _lines(f"start: {_calls(grammar, tools)}", *_alone(grammar, mark), *_call(grammar, tools, mark))
    start = _text_or_calls(grammar, tools, mark) if grammar.start is None else grammar.start(mark)
    return _lines(*start, *_call(grammar, tools, mark))


def calls(grammar: Grammar, tools: Tools, mark: Mark) -> str:
    """The rule `calls` of an answer of calls without text."""
    return _lines(f"calls: {_calls(grammar, tools)}", *_alone(grammar, mark), *_call(grammar, tools, mark))


def _lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"


def _text_or_calls(grammar: Grammar, tools: Tools, mark: Mark) -> list[str]:
    """The rule `start` of text that may contain calls, with the rules that it uses except `call`."""
    many = tools.parallel and grammar.between is not None
    return [
        f"start: {'call* TEXT' if many else 'TEXT | call'}",
        *_after_text(grammar, mark),
        _NOT_JSON if grammar.opening is None else TEXT,
    ]


def _calls(grammar: Grammar, tools: Tools) -> str:
    return f"call ({grammar.between} call)*" if tools.parallel and grammar.between is not None else "call"


def _call(grammar: Grammar, tools: Tools, mark: Mark) -> list[str]:
    """The rule `call`, with the rules that it uses except `opening`."""
    functions = tools.callable
    items = [
        f"call_{index}: {grammar.item(function.name, f'arguments_{index}', mark)}"
        for index, function in enumerate(functions)
    ]
    made = [
        f"call: {grammar.call('opening', 'item', mark, tools.parallel)}",
        "item: " + " | ".join(f"call_{index}" for index in range(len(items))),
        *items,
    ]
    rules = _arguments_of_all(grammar, functions, tools.choice == "required", _size(made), mark)
    return [*made, *_once(rules)]


def _arguments_of_all(
    grammar: Grammar, functions: Sequence[Function], forced: bool, taken: int, mark: Mark
) -> list[list[str]]:
    """The rules of each function's arguments: enforced if it is strict, and where possible if calls are forced.

    Args:
        taken: number of characters of the other rules.
    """
    arguments = grammar.arguments or _json_arguments
    made = [arguments(function, index, function.strict, mark) for index, function in enumerate(functions)]
    # Larger grammars are refused: it is better to check some functions' arguments than to serve none.
    room = min(_MAX_ROOM, MAX_FORM_CHARACTERS - _REST - taken - _size(_once(made)))
    for index, function in enumerate(functions) if forced else ():
        if function.strict or function.schema_size > room:
            continue
        try:
            rules = arguments(function, index, True, mark)
        except InvalidRequestError:
            continue
        if _size(rules) <= room:
            room -= _size(rules)
            made[index] = rules
    return made


def _once(rules: Iterable[Sequence[str]]) -> Collection[str]:
    return dict.fromkeys(itertools.chain.from_iterable(rules))


def _size(rules: Iterable[str]) -> int:
    return sum(len(rule) + 1 for rule in rules)


def _alone(grammar: Grammar, mark: Mark) -> Sequence[str]:
    """The rule `opening` of calls that begin the answer."""
    return [] if grammar.opening is None else [f"opening: {mark(grammar.opening)}"]


def _after_text(grammar: Grammar, mark: Mark) -> Sequence[str]:
    """The rule `opening` of calls that may follow text."""
    if grammar.opening is None:
        return []
    opening = mark(grammar.opening)
    # TEXT cannot contain a special token. Another mark begins a call where it first occurs, hence `lazy`.
    return [f"opening: TEXT {opening}"] if opening.startswith("<") else [f"opening[lazy]: TEXT {opening}"]


def _json_arguments(function: Function, index: int, valid: bool, mark: Mark) -> list[str]:
    if not valid:
        return [f"arguments_{index}: any_object", 'any_object: %json {"type": "object"}']
    return [f"arguments_{index}: {schema_rule(function, function.schema)}"]


def schema_rule(function: Function, schema: object) -> str:
    """The rule of JSON that satisfies a schema; if the function is not strict, only as far as it can be enforced.

    Raises:
        InvalidRequestError: a number of the schema was rounded; `param` is "tools".
    """
    check_exact(schema, "tools", function.name)
    directive = "%json" if function.strict else "%json_if_possible"
    return f"{directive} {json.dumps(schema)} // {function.name}"


def thought(marks: Marks, opened: bool, mark: Mark) -> str:
    """The rule `before` of reasoning between two tags; `opened`: the prompt ends with the first one."""
    spaces = r"/\n{0,2}/"
    label = f" {json.dumps(marks.label)}" if marks.label else ""
    begun = f"thinking {spaces}" if opened else f"({mark(marks.open)}{label} thinking {spaces})?"
    return f"before: {begun}\n{thinking(mark(marks.close))}"


def thinking(end: str) -> str:
    """The rule `thinking` of text up to a tag."""
    return f"thinking: /(?s:.*)/ {end}" if end.startswith("<") else f"thinking[lazy]: /(?s:.*)/ {end}"
