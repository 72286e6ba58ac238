"""The files of a release state the package's version."""

import re
from pathlib import Path

from penstock import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_the_chart_and_the_image_have_the_version_of_the_package() -> None:
    chart = (ROOT / "deploy" / "helm" / "penstock" / "Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (.*)$", chart, re.MULTILINE) == [__version__] * 2
    assert f"image: penstock:{__version__}\n" in (ROOT / "deploy" / "compose.yml").read_text()


def test_the_changelog_has_a_section_for_what_is_not_released_yet_or_for_this_version() -> None:
    assert re.search(rf"^## (Unreleased|{re.escape(__version__)})$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
