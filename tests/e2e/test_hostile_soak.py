"""The hostile soak, for as long as a test may take; the whole is `python -m benchmarks.robustness.hostile_soak`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_hostile_bytes_of_every_kind_change_no_good_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.robustness.hostile_soak", "--seconds", "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good answers    " in done.stdout
