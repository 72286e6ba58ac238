"""The README's Python runs as it stands there, and prints right answers."""

import re
import subprocess
import sys
from pathlib import Path

from tests.server.running import running_server

README = Path(__file__).parent.parent / "README.md"


def run(example: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_the_offline_example_runs_and_answers_rightly() -> None:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    example = next(block for block in blocks if "from penstock import LLM" in block)
    printed = run(example)
    assert [word in printed for word in ("95", "revir", "4, 15, 31, 92")] == [True] * 3, printed


def test_the_examples_with_clients_run_and_are_answered_rightly() -> None:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    address = "http://127.0.0.1:8000"
    with running_server("--threads", "1") as server:
        printed = [run(block.replace(address, server.url)).splitlines() for block in blocks if address in block]
    assert printed == [["4, 15, 31, 92"], ["37 + 58 = 95"] * 2]
