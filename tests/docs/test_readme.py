"""The README's Python runs as it stands there, and prints right answers."""

import re
import subprocess
import sys
from pathlib import Path

from tests.server.running import running_server

README = Path(__file__).parents[2] / "README.md"


def run(example: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True, timeout=240
    ).stdout


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_offline_examples_run_and_answer_rightly() -> None:
    first, structured = (run(block) for block in python_blocks() if "from penstock import LLM" in block)
    assert [word in first for word in ("95", "revir", "4, 15, 31, 92")] == [True] * 3, first
    assert structured == '{"name": "Alice", "age": 34, "city": "Paris"}\n'


def test_the_examples_with_clients_run_and_are_answered_rightly() -> None:
    address = "http://127.0.0.1:8000"
    with running_server("--threads", "1") as server:
        printed = [
            run(block.replace(address, server.url)).splitlines() for block in python_blocks() if address in block
        ]
    assert printed == [["4, 15, 31, 92"], ["37 + 58 = 95"] * 2]
