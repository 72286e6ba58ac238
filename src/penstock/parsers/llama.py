"""Llama 3's calls: JSON that is the whole answer, or that follows a special token.

{"name": "get_weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": ...}

Without the token, only JSON with the name of an offered tool is a call.
"""

from collections.abc import Callable

from penstock.parsers.grammar import Grammar, Mark, json_call
from penstock.parsers.reading import Reader, Reading, call_object, read_until, skip_spaces

TAG = "<|python_tag|>"


def read(reading: Reading) -> Reader[None]:
    """Read an answer."""
    while (character := (yield)).isspace():
        reading.emit_text(character)
    reading.push_back(character)
    if character == "{":
        reading.buffer("")
        yield from _calls(reading, reading.is_tool)
    while (yield from read_until(reading.emit_text, TAG)):
        reading.buffer(TAG)
        reading.push_back((yield from skip_spaces()))
        yield from _calls(reading, reading.may_call)


def _calls(reading: Reading, is_name: Callable[[str], bool]) -> Reader[None]:
    """Reads a run of call objects, optionally separated by semicolons; anything else is text."""
    while (yield from call_object(reading, is_name)):
        character = yield from skip_spaces()
        if character == ";":
            reading.buffer(character)
            character = yield from skip_spaces()
            reading.push_back(character)
        else:
            reading.push_back(character)
            reading.buffer("")
    reading.reject()


def _call(opening: str, items: str, mark: Mark, many: bool) -> str:
    return items


GRAMMAR = Grammar(
    opening=None, item=json_call("parameters"), call=_call, between=None, documents=None, key="parameters"
)
