"""Calls of Hermes, Qwen and the demo model.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from penstock.parsers.grammar import Grammar, Mark, document_after, json_call
from penstock.parsers.reading import Reader, Reading, call_object, expect, read_until, skip_spaces

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(reading: Reading) -> Reader[None]:
    """Read an answer."""
    while (yield from read_until(reading.emit_text, OPEN)):
        reading.buffer(OPEN)
        reading.push_back((yield from skip_spaces()))
        if not (yield from call_object(reading, reading.may_call, broken_by="<")):
            reading.reject()
            continue
        reading.push_back((yield from skip_spaces()))
        yield from expect(reading, CLOSE)


def _call(opening: str, items: str, mark: Mark, many: bool) -> str:
    return f'{opening} "\\n" {items} "\\n" {mark(CLOSE)}'


GRAMMAR = Grammar(
    opening=OPEN,
    item=json_call("arguments"),
    call=_call,
    between='"\\n"',
    documents=document_after(OPEN),
    key="arguments",
)
