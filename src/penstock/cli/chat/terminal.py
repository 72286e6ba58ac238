"""A chat on a terminal: editing, history and completion by prompt_toolkit, answers drawn by rich."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from penstock.cli.chat.commands import completions, is_command, run_command
from penstock.cli.chat.markdown import AnswerView, visible
from penstock.cli.chat.session import Answer, Question, Session
from penstock.errors import PenstockError
from penstock.parsers.parts import Reasoning

HINT = "/help lists the commands. Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D ends."
QUOTES = '"""'
"""Marks around a message of several lines, as in Ollama."""


@contextlib.contextmanager
def typing_held() -> Iterator[None]:
    """Context in which keys typed while a model loads or answers are not echoed, and appear at the next prompt.

    Ctrl-C remains a signal.
    """
    try:
        import termios
    except ImportError:  # on Windows
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    held = termios.tcgetattr(descriptor)
    held[0] &= ~termios.ICRNL  # Enter stays Enter
    held[3] = held[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH  # Ctrl-C discards nothing
    termios.tcsetattr(descriptor, termios.TCSANOW, held)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def run_terminal(session: Session) -> None:
    """Chat until /exit or Ctrl-D, within `typing_held`."""
    console = Console(highlight=False)
    console.print(f"{visible(session.backend.model)}. {HINT}", style="dim", markup=False)
    prompt = _prompt(session)
    while _take_turn(session, console, prompt):
        pass


def _take_turn(session: Session, console: Console, prompt: "PromptSession[str]") -> bool:
    """Read a message or a command, and respond to it; False if the chat ends."""
    try:
        text = prompt.prompt()
        return not text.strip() or _respond(session, console, text)
    except KeyboardInterrupt:  # at the prompt, or for a second time while an answer is being stopped
        console.print("/exit or Ctrl-D ends.", style="dim")
        return True
    except EOFError:
        return False


def _respond(session: Session, console: Console, text: str) -> bool:
    """Answer a message or carry out a command; False if the chat ends."""
    question: Question | None = None
    try:
        if not is_command(text):
            question = session.question(_unquoted(text))
        else:
            result = run_command(session, text)
            if result.ends:
                return False
            if result.text:
                console.print(visible(result.text), style="dim", markup=False)
            question = result.question
        if question is not None:
            _answer(session, console, question)
    except PenstockError as error:
        console.print(f"error: {visible(str(error))}", style="red", markup=False)
    return True


def _answer(session: Session, console: Console, question: Question) -> None:
    answer = session.begin()
    try:
        with AnswerView(console) as view, contextlib.suppress(KeyboardInterrupt):
            _draw(view, session, question, answer)
    finally:
        is_kept = session.finish(question, answer)
    if answer.ending is not None and answer.ending.error is not None:
        raise PenstockError(answer.ending.error)
    note = "" if is_kept else "; the question is not kept"
    console.print(f"{answer.summary()}{note}\n", style="dim", markup=False)


def _draw(view: AnswerView, session: Session, question: Question, answer: Answer) -> None:
    with contextlib.closing(session.stream(question, answer)) as pieces:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                view.add_reasoning(piece.text)
            else:
                view.add_text(piece.text)


def _prompt(session: Session) -> "PromptSession[str]":
    prompt: PromptSession[str] = PromptSession(
        FormattedText([("bold ansicyan", "> ")]),
        multiline=True,  # so that a paste of several lines is one message
        prompt_continuation="  ",
        history=_history(),
        key_bindings=_keys(),
        completer=_Completer(session),
        complete_in_thread=True,  # it may ask the server for its models
        complete_while_typing=Condition(lambda: prompt.default_buffer.text.startswith("/")),
        reserve_space_for_menu=4,
        enable_suspend=True,
    )
    return prompt


def _keys() -> KeyBindings:
    keys, is_message = KeyBindings(), has_focus(DEFAULT_BUFFER)  # not the search of the history

    @keys.add("enter", filter=is_message)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) == 1:
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=is_message)
    @keys.add("c-j", filter=is_message)
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _unquoted(text: str) -> str:
    stripped = text.strip()
    is_quoted = len(stripped) >= 2 * len(QUOTES) and stripped.startswith(QUOTES) and stripped.endswith(QUOTES)
    return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n") if is_quoted else stripped


def _history() -> History:
    """The messages of earlier chats, in a file that only its owner can read; of this chat alone without such a file."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "penstock"
    file = folder / "chat_history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)


class _Completer(Completer):
    """Completes commands and their arguments."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, argument = text.partition(" ")
        if space and command in ("/save", "/load", "/image"):
            yield from self._paths.get_completions(Document(argument), complete_event)
            return
        with contextlib.suppress(PenstockError):  # the server does not say which models there are
            length, words = completions(self._session, text)
            yield from (Completion(word, -length) for word in words)
