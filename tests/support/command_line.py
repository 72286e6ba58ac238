"""Commands run in the test's process, which has loaded torch: the fixture `penstock` of tests/conftest.py."""

import io
import subprocess
import sys
from collections.abc import Callable

import pytest

from penstock.cli import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, given: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run a command with `given` as its standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    try:
        code: object = main(list(arguments))
    except SystemExit as ended:  # argparse's
        code = ended.code
    assert isinstance(code, int)
    printed = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)
