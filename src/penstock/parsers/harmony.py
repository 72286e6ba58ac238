"""gpt-oss's answers ("harmony"): messages in channels; a message to a function is a call.

    <|channel|>analysis<|message|>The user wants ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

The tags are special tokens; the prompt ends with the first `<|start|>assistant`. The channel `analysis` is
reasoning; `final`, and `commentary` without a recipient, is text. Adjacent messages of text, or of reasoning, are
separated by a line break.
"""

import re
from collections.abc import Callable, Sequence

from penstock.api.tools import Function
from penstock.parsers.grammar import TEXT, Grammar, Mark, thinking
from penstock.parsers.reading import Reader, Reading, expect, json_value, read_until, skip_spaces

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_ENDS = (END, CALL, RETURN)
_LONGEST_HEADER = 256
_RECIPIENT = re.compile(r" to=(?:functions\.)?([^\s<]*)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(analysis|commentary|final)")


def read(reading: Reading) -> Reader[None]:
    """Read an answer."""
    last: Callable[[str], None] | None = None  # what took the message before this one
    while True:
        reading.buffer("")
        character = yield from skip_spaces()
        if not character:
            reading.reject()
            return
        reading.push_back(character)
        header = yield from _header(reading)
        channel = None if header is None else _CHANNEL.search(header)
        if header is None or channel is None:
            reading.read_again()
            reading.emit_text((yield))  # one at least, so that a mark is not read again and again
            yield from _content(reading, reading.emit_text)
            last = reading.emit_text
            continue
        to = _RECIPIENT.search(header)
        if to and reading.may_call(to[1]):
            reading.emit_call(to[1])
            yield from _arguments(reading)
            last = None
            continue
        take = reading.emit_reasoning if channel[1] == "analysis" else reading.emit_text
        if take == last:
            reading.separate()
        elif reading.emit_reasoning in (take, last):
            reading.turn()
        reading.drop()
        if to and take == reading.emit_text:
            reading.emit_text(header)
        yield from _content(reading, take)
        last = take


def _header(reading: Reading) -> Reader[str | None]:
    """The header of a message, from the held text; None if there is none."""
    begun = yield
    reading.push_back(begun)
    if begun == "t" and (yield from expect(reading, "to=")):
        written = list(" to=")
    elif begun == "<":
        written = []
    else:
        return None
    while len(written) < _LONGEST_HEADER and (character := (yield)):
        written.append(character)
        if character == ">" and "".join(written[-len(MESSAGE) :]) == MESSAGE:
            return "".join(written)
    return None


def _arguments(reading: Reading) -> Reader[None]:
    """Parse the message of a call; inside JSON strings, tags are text."""
    character = yield from skip_spaces()
    reading.push_back(character)
    if character == "{":
        yield from json_value(reading, reading.emit_arguments, broken_by="<")
    yield from _content(reading, reading.emit_arguments)


def _content(reading: Reading, take: Callable[[str], None]) -> Reader[None]:
    """Parse a message, up to its end or the start of the next."""
    while (yield from read_until(take, "<|")):
        for mark in _ENDS:
            if (yield from expect(reading, mark[2:])):
                return
        if (yield from expect(reading, START[2:])):
            for character in reversed(START):
                reading.push_back(character)
            return
        take("<|")


def thoughts(mark: Mark) -> str:
    """The rule `before` of messages with reasoning."""
    return "\n".join(["before: thought*", _message("thought", '"analysis"', mark), thinking(mark(END))])


def header(mark: Mark) -> str:
    """The header of the final message."""
    return f'{mark(CHANNEL)} "final" {mark(MESSAGE)}'


def _message(rule: str, kind: str, mark: Mark) -> str:
    """The rule of a message that is not the last."""
    return f'{rule}: {mark(CHANNEL)} {kind} {mark(MESSAGE)} thinking {mark(START)} "assistant"'


def _messages(mark: Mark) -> list[str]:
    """The rules of an answer: messages, of which the last may be a call."""
    return [
        "start: message* (last | call)",
        _message("message", "KIND", mark),
        f"last: {mark(CHANNEL)} KIND {mark(MESSAGE)} TEXT",
        'KIND: "analysis" | "commentary" | "final"',
        TEXT,
        thinking(mark(END)),
    ]


def _item(name: str, arguments: str, mark: Mark) -> str:
    """The rule of a call, with the recipient after or before the channel; `<|call|>` is optional, as a call ends it."""
    recipient, channel = f" to=functions.{name}", mark(CHANNEL)
    headers = f'{channel} "commentary{recipient} "', f'"{recipient}" {channel} "commentary "'
    return f'({" | ".join(headers)}) {mark(CONSTRAIN)}? "json" {mark(MESSAGE)} {arguments}'


def _call(opening: str, items: str, mark: Mark, many: bool) -> str:
    return items


def _documents(functions: Sequence[Function], mark: Mark) -> Sequence[str]:
    return (f'"json" {mark(MESSAGE)}',)


GRAMMAR = Grammar(opening=None, item=_item, call=_call, between=None, documents=_documents, start=_messages)
