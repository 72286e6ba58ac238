"""The prompt by itself; tests/cli/test_interrupts.py runs the command on a pseudo-terminal."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from penstock.cli.chat.terminal import _Completer, _prompt, _unquoted
from tests.cli.chat.echo import new_session

Typed = Callable[[str], str]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Typed]:
    """The message that keys give."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):

        def message(keys: str) -> str:
            pipe.send_text(keys)
            return _prompt(new_session()).prompt()

        yield message


def test_pasted_lines_and_lines_by_alt_enter_are_one_message(typed: Typed) -> None:
    assert typed("\x1b[200~one\ntwo\x1b[201~\r") == "one\ntwo"
    assert typed("one\x1b\rtwo\r") == "one\ntwo"


def test_three_quotes_hold_a_message_open(typed: Typed) -> None:
    assert _unquoted(typed('"""one\rtwo"""\r')) == "one\ntwo"


def test_messages_are_remembered_searched_and_private(typed: Typed, tmp_path: Path) -> None:
    typed("first question\r")
    typed("second\r")
    assert typed("\x1b[A\x1b[A\r") == "first question"
    assert typed("\x12quest\r\r") == "first question"
    (file,) = tmp_path.rglob("chat_history")
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def test_commands_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "chat.json").touch()

    def completed(text: str) -> list[str]:
        return [one.text for one in _Completer(new_session()).get_completions(Document(text), CompleteEvent())]

    assert completed("/regen") == ["/regenerate"]
    assert completed(f"/load {tmp_path}/ch") == ["at.json"]
    assert completed("what is /re") == []
