"""docs/performance.md is what benchmarks/page.py makes of the results, and the README claims no more."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_performance_page_is_generated_from_the_results() -> None:
    page = subprocess.run(
        [sys.executable, "-m", "benchmarks.page"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    kept = (ROOT / "docs" / "performance.md").read_text()
    assert kept == page.stdout, "run: python -m benchmarks.page > docs/performance.md"


def test_the_readme_claims_the_speeds_of_the_newest_results() -> None:
    claims = "from benchmarks import page; print('\\n'.join(page.claims()))"
    printed = subprocess.run(
        [sys.executable, "-c", claims], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert printed
    for claim in printed:
        assert claim in readme, claim
