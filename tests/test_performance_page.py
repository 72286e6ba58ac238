"""docs/performance.md is what benchmarks/page.py makes of the results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_performance_page_is_generated_from_the_results() -> None:
    page = subprocess.run([sys.executable, "benchmarks/page.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    kept = (ROOT / "docs" / "performance.md").read_text()
    assert kept == page.stdout, "run: python benchmarks/page.py > docs/performance.md"
