"""The README's Python runs as it stands there, and prints right answers."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_offline_example_runs_and_answers_rightly() -> None:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    example = next(block for block in blocks if "from penstock import LLM" in block)
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True, timeout=120)
    assert [word in run.stdout for word in ("95", "revir", "4, 15, 31, 92")] == [True] * 3, run.stdout
