"""Mistral's calls: in one list, or, since 2025, each after its name.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": ...}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]...

The tags are special tokens. In the newer format some models omit `[ARGS]`, and some insert `[CALL_ID]` and an id before
it.
"""

from penstock.parsers.grammar import Grammar, Mark, document_after, json_call
from penstock.parsers.reading import (
    Reader,
    Reading,
    arguments,
    call_object,
    expect,
    name_of_tool,
    read_until,
    skip_spaces,
)

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read(reading: Reading) -> Reader[None]:
    """Read an answer."""
    while (yield from read_until(reading.emit_text, CALLS)):
        reading.buffer(CALLS)
        character = yield from skip_spaces()
        if character == "[":
            yield from _list(reading)
        else:
            reading.push_back(character)
            yield from _named(reading)


def _list(reading: Reading) -> Reader[None]:
    while True:
        reading.push_back((yield from skip_spaces()))
        if not (yield from call_object(reading, reading.may_call)):
            reading.reject()
            return
        character = yield from skip_spaces()
        if character != ",":
            reading.push_back("" if character == "]" else character)
            return
        reading.buffer(character)


def _named(reading: Reading) -> Reader[None]:
    name = yield from name_of_tool(reading)
    if (yield from expect(reading, CALL_ID)):
        yield from name_of_tool(reading)
    yield from expect(reading, ARGUMENTS)
    character = yield from skip_spaces()
    reading.push_back(character)
    if character != "{" or not reading.may_call(name):
        reading.reject()
        return
    reading.emit_call(name)
    yield from arguments(reading, broken_by="")


def _call_list(opening: str, items: str, mark: Mark, many: bool) -> str:
    rest = f' (", " {items})*' if many else ""
    return f'{opening} " "? "[" {items}{rest} "]"'


def _call_by_name(opening: str, items: str, mark: Mark, many: bool) -> str:
    return f"{opening} {items}"


def _item_by_name(name: str, arguments: str, mark: Mark) -> str:
    return f'"{name}" {mark(ARGUMENTS)} {arguments}'


LIST = Grammar(
    CALLS, json_call("arguments"), _call_list, between=None, documents=document_after(CALLS), key="arguments"
)
BY_NAME = Grammar(CALLS, _item_by_name, _call_by_name, between="", documents=document_after(ARGUMENTS))
