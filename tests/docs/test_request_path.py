"""docs/architecture.md names the files that one chat request runs through, and they are few enough to read."""

import re
from pathlib import Path

from penstock import native
from tests.support.request_path import request_path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
MOST = 69


def test_the_page_names_the_files_of_a_chat_request_and_they_are_few(tiny_llama: Path) -> None:
    listing = re.search(r"^## The files of a request\n.*?```\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert listing is not None
    named = listing[1].split()
    paths = [one for one in named if one.endswith(".py")]
    assert len(paths) == len(set(paths)) <= MOST
    if native.library() is not None:  # else the model runs eagerly, on the reference
        assert set(request_path(tiny_llama)) == set(paths)
