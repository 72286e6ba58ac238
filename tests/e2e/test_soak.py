"""The soak, for as long as a test may take; the whole of it is `python benchmarks/soak.py`."""

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_a_little_while_of_mixed_load_with_kills_and_aborts_leaves_nothing_behind() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.25", "--kill-every", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 kills" not in done.stdout
