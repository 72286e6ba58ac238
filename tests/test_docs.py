"""The Markdown pages are well formed: every table is one that a reader sees as a table."""

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def tables(page: str) -> list[list[str]]:
    """The tables of a page, as lines; code blocks are no tables."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    runs = itertools.groupby(prose.splitlines(), key=lambda line: line.startswith("|"))
    return [list(lines) for is_table, lines in runs if is_table]


def num_cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) - 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_table_has_a_header_rows_and_as_many_cells_in_each(page: Path) -> None:
    for table in tables(page.read_text()):
        assert len(table) >= 3, table
        assert re.fullmatch(r"\|(?: ?:?-+:? ?\|)+", table[1]), table[:2]
        assert len({num_cells(row) for row in table}) == 1, table[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_row_stands_twice(page: Path) -> None:
    for table in tables(page.read_text()):
        assert len(set(table)) == len(table), table[0]
