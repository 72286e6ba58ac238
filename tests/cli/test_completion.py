"""`penstock completion`: a shell's Tab key completes commands and flags."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock ser", {"serve "}),
        ("penstock serve --max-num-s", {"--max-num-seqs "}),
        ("penstock serve --dtype bf", {"bfloat16 "}),
    ],
)
def test_the_tab_key_completes(tmp_path: Path, line: str, expected: set[str]) -> None:
    found = tmp_path / "found"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    environment = os.environ | asked | {"_ARGCOMPLETE_STDOUT_FILENAME": str(found), "_ARGCOMPLETE_SUPPRESS_SPACE": "0"}
    subprocess.run([sys.executable, "-m", "penstock.cli"], env=environment, check=True)
    assert set(filter(None, found.read_text().split("\n"))) == expected


@pytest.mark.parametrize(("shell", "part"), [("bash", "complete "), ("zsh", "compdef"), ("fish", "complete --command")])
def test_each_shell_gets_its_code(shell: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert part in printed
    assert "penstock" in printed
