"""docs/performance.md is what benchmarks/page.py makes of the results, and the README claims no more."""

import json
import re
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


def test_the_table_of_extras_has_the_megabytes_that_were_measured() -> None:
    """Of all extras but for development."""
    files = list((ROOT / "benchmarks" / "results").glob("*/extras.json"))
    assert len(files) == 1, "the sizes do not depend on the machine: keep the newest file alone"
    rows = {row: entry["value"] for row, entry in json.loads(files[0].read_text()).items()}
    measured = {
        name: (f"{rows[f'{name}, download, MB']:,.0f}", f"{rows[f'{name}, disk, MB']:,.0f}")
        for name in {row.split(",")[0] for row in rows}
    }
    table = (ROOT / "docs" / "dependencies.md").read_text()
    said = {name: sizes for name, *sizes in re.findall(r"^\| `([a-z-]+)` \| ([\d,]+) · ([\d,]+) \|", table, re.M)}
    assert {name: tuple(sizes) for name, sizes in said.items()} == measured
    _, _, project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    extras = re.findall(r"^([a-z-]+) = \[", project.partition("\n[project.scripts]")[0], re.M)
    assert measured.keys() == {*extras} - {"dev"}
