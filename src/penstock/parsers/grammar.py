"""Grammars that make a model call tools, and call them well: in Lark's notation, as llguidance takes it.

Forced, an answer is calls. Not forced, it is any text; but a call that it begins it writes to the end, of a tool that
there is and with arguments that validate. Beside a form, it is calls or a text of the form.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import InvalidRequestError
from penstock.parsers.reasoning import Marks
from penstock.parsers.tools import Function, Tools
from penstock.sampling_params import MAX_FORM_CHARACTERS, check_exact

Mark = Callable[[str], str]
"""A format's mark in a grammar: a special token, or its text."""

_MAX_ROOM = MAX_FORM_CHARACTERS // 2
"""Maximum characters of the rules of tools that are not strict: those that would take more are not enforced."""
_REST = 2**12
"""Characters for the rules of text and reasoning."""
TEXT = "TEXT: /(?s:.*)/"
_NOT_JSON = r"TEXT: /([^{\s](?s:.*))?/"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The structure of a format's calls."""

    opening: str | None
    """The mark before a call; None if an answer that is a call begins with it."""
    item: Callable[[str, str, Mark], str]
    """One call, of a name and the rule for its arguments."""
    call: Callable[[str, str, Mark, bool], str]
    """Calls from the opening to their end, of a rule for the opening and one for items; the last says if several."""
    between: str | None
    """The separator of calls with an opening each; None if there is one opening at most."""
    documents: Callable[[Sequence[Function], Mark], Sequence[str]] | None
    """What precedes the JSON in calls of these functions; None if an answer that is a call begins with it."""
    key: str = ""
    """The property of that JSON that holds the arguments; empty if it is the arguments, or a part of them."""
    arguments: "Callable[[Function, int, bool, Mark], list[str]] | None" = None
    """The rule `arguments_N` of a function's arguments, by its place N, and whether they validate; None: JSON.

    Raises InvalidRequestError if they are to validate and cannot; those of a function that is not strict are then free.
    Further rules that functions share are the same text, and are written once.
    """
    start: Callable[[Mark], list[str]] | None = None
    """The rule `start` of answers of text or calls, and those that it needs; None: text up to the mark of a call."""


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
    """A rule `calls` of an answer that is calls and no text."""
    return _lines(f"calls: {_calls(grammar, tools)}", *_alone(grammar, mark), *_call(grammar, tools, mark))


def _lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"


def _text_or_calls(grammar: Grammar, tools: Tools, mark: Mark) -> list[str]:
    """The rule `start` of text in which calls may stand, and those that it needs but for `call`."""
    many = tools.parallel and grammar.between is not None
    return [
        f"start: {'call* TEXT' if many else 'TEXT | call'}",
        *_after_text(grammar, mark),
        _NOT_JSON if grammar.opening is None else TEXT,
    ]


def _calls(grammar: Grammar, tools: Tools) -> str:
    return f"call ({grammar.between} call)*" if tools.parallel and grammar.between is not None else "call"


def _call(grammar: Grammar, tools: Tools, mark: Mark) -> list[str]:
    """The rule `call`, and those that it needs but for `opening`."""
    functions = tools.callable
    items = [
        f"call_{index}: {grammar.item(one.name, f'arguments_{index}', mark)}" for index, one in enumerate(functions)
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
    """The rules of each function's arguments: a strict one's validate; if calls are forced, others' where they can.

    Args:
        taken: characters of other rules.
    """
    arguments = grammar.arguments or _json_arguments
    made = [arguments(one, index, one.strict, mark) for index, one in enumerate(functions)]
    room = min(_MAX_ROOM, MAX_FORM_CHARACTERS - _REST - taken - _size(_once(made)))
    for index, one in enumerate(functions) if forced else ():
        if one.strict or one.schema_size > room:
            continue
        try:
            rules = arguments(one, index, True, mark)
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
    """The rule `opening` of calls before which nothing stands."""
    return [] if grammar.opening is None else [f"opening: {mark(grammar.opening)}"]


def _after_text(grammar: Grammar, mark: Mark) -> Sequence[str]:
    """The rule `opening` of calls before which text may stand."""
    if grammar.opening is None:
        return []
    opening = mark(grammar.opening)
    return [f"opening: TEXT {opening}"] if opening.startswith("<") else [f"opening[lazy]: TEXT {opening}"]


def _json_arguments(function: Function, index: int, valid: bool, mark: Mark) -> list[str]:
    if not valid:
        return [f"arguments_{index}: any_object", 'any_object: %json {"type": "object"}']
    return [f"arguments_{index}: {schema_rule(function, function.schema)}"]


def schema_rule(function: Function, schema: object) -> str:
    """JSON of a schema within a function's; if the function is not strict, only as far as it can be enforced.

    Raises:
        InvalidRequestError: a number of the schema was rounded; `param` is "tools".
    """
    check_exact(schema, "tools", function.name)
    directive = "%json" if function.strict else "%json_if_possible"
    return f"{directive} {json.dumps(schema)} // {function.name}"


def thought(marks: Marks, opened: bool, mark: Mark) -> str:
    """A rule `before` for reasoning between two marks; `opened` if the prompt holds the first one."""
    spaces = r"/\n{0,2}/"
    label = f" {json.dumps(marks.label)}" if marks.label else ""
    begun = f"thinking {spaces}" if opened else f"({mark(marks.open)}{label} thinking {spaces})?"
    return f"before: {begun}\n{thinking(mark(marks.close))}"


def thinking(end: str) -> str:
    """A rule `thinking` for text up to a mark."""
    return f"thinking: /(?s:.*)/ {end}" if end.startswith("<") else f"thinking[lazy]: /(?s:.*)/ {end}"
