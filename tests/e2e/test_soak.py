"""The soak, for as long as a test may take; the whole is `python -m benchmarks.robustness.soak`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_little_while_of_mixed_load_with_kills_and_aborts_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "benchmarks.robustness.soak", "--minutes", "0.15", "--kill-every", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 kills" not in done.stdout
