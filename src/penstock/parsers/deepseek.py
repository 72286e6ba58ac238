"""Calls as DeepSeek V3 and R1 write them, and, from V3.1 on, without the kind of tool and the fence.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>...<｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>...

The tags are special tokens; the one that closes the list may be missing.
"""

from penstock.parsers.grammar import Grammar, Mark, document_after
from penstock.parsers.reading import Reader, Reading, arguments, expect, name_of_tool, read_until, skip_spaces

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json\n", "\n```"
KIND = "function"


def read(reading: Reading) -> Reader[None]:
    """Read an answer."""
    while (yield from read_until(reading.emit_text, CALLS)):
        reading.buffer(CALLS)
        reading.push_back((yield from skip_spaces()))
        if not (yield from _call(reading)):
            reading.reject()
            continue
        while True:
            reading.push_back((yield from skip_spaces()))
            if (yield from expect(reading, CALLS_END)):
                break
            reading.buffer("")
            if not (yield from _call(reading)):
                reading.read_again()
                break


def _call(reading: Reading) -> Reader[bool]:
    """Parse one call of either format; its text is held back meanwhile."""
    if not (yield from expect(reading, CALL)):
        return False
    name = yield from name_of_tool(reading)
    if not (yield from expect(reading, SEPARATOR)):
        return False
    fenced = name == KIND
    if fenced:
        named = yield from name_of_tool(reading)
        fenced = bool(named)
        name = named or name
    is_name = reading.is_tool if name == KIND else reading.may_call  # the kind of a tool, unless it is offered
    if not is_name(name):
        return False
    if fenced:
        reading.push_back((yield from skip_spaces()))
        if not (yield from expect(reading, FENCE)):
            return False
    reading.emit_call(name)
    yield from arguments(reading, broken_by="`<")
    reading.push_back((yield from skip_spaces()))
    yield from expect(reading, FENCE_END.strip())
    reading.push_back((yield from skip_spaces()))
    yield from expect(reading, CALL_END)
    return True


def _fenced(name: str, arguments: str, mark: Mark) -> str:
    return f'{mark(CALL)} "{KIND}" {mark(SEPARATOR)} "{name}\\n" "```json\\n" {arguments} "\\n```" {mark(CALL_END)}'


def _plain(name: str, arguments: str, mark: Mark) -> str:
    return f'{mark(CALL)} "{name}" {mark(SEPARATOR)} {arguments} {mark(CALL_END)}'


def _calls_by_line(opening: str, items: str, mark: Mark, many: bool) -> str:
    rest = f' ("\\n" {items})*' if many else ""
    return f"{opening} {items}{rest} {mark(CALLS_END)}"


def _calls(opening: str, items: str, mark: Mark, many: bool) -> str:
    rest = f" ({items})*" if many else ""
    return f"{opening} {items}{rest} {mark(CALLS_END)}"


FENCED = Grammar(CALLS, _fenced, _calls_by_line, between=None, documents=document_after(FENCE))
PLAIN = Grammar(CALLS, _plain, _calls, between=None, documents=document_after(SEPARATOR))
