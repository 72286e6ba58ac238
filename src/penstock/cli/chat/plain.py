"""A chat without a terminal: a line of standard input is a message, and the answer's text is written as it comes."""

import sys
from collections.abc import Iterator

from penstock.cli.chat.session import Answer, Question, Session
from penstock.errors import PenstockError
from penstock.parsers.parts import Text


def run_plain(session: Session) -> None:
    for line in _lines_typed():
        if line == "/exit":
            break
        if line == "/reset":
            session.conversation = session.conversation.without_messages()
            continue
        question, answer = session.question(line), session.begin()
        try:
            _show(session, question, answer)
        except PenstockError as error:  # too long by now, for one: the conversation stays as it was
            print(f"penstock: error: {error}", file=sys.stderr)
            if answer.ending is None:
                continue
        session.finish(question, answer)


def _lines_typed() -> Iterator[str]:
    is_typed = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_typed else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print("\n/exit or Ctrl-D ends.", file=sys.stderr)
            continue
        if line:
            yield line


def _show(session: Session, question: Question, answer: Answer) -> None:
    """Write the answer's text to standard output, and its reasoning to standard error. Ctrl-C ends it."""
    try:
        for piece in session.stream(question, answer):
            print(piece.text, end="", flush=True, file=sys.stdout if isinstance(piece, Text) else sys.stderr)
        if answer.ending is not None and answer.ending.error is not None:
            print(f"penstock: error: {answer.ending.error}", file=sys.stderr)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        print()
