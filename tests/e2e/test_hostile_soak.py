"""The hostile soak, for as long as a test may take; the whole of it is `python benchmarks/hostile_soak.py`."""

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "hostile_soak.py"


def test_hostile_bytes_of_every_kind_change_no_good_answer() -> None:
    done = subprocess.run([sys.executable, str(SOAK), "--seconds", "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good answers    " in done.stdout
