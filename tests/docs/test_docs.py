"""The Markdown pages are well formed, and what they refer to exists: links, files, commands and flags."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from penstock.cli import COMMANDS, make_parser
from penstock.cli.parser import FOREIGN_FLAGS

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|data:)([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), target


def test_hints_to_install_an_extra_name_one_of_the_source_folder() -> None:
    """The package is on no index: `pip install penstock[...]` fails, or is another package."""
    extras = set(re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text().split("optional-dep")[1], re.M))
    for file in [*PAGES, *(ROOT / "src").rglob("*.py")]:
        text = file.read_text()
        assert "penstock[" not in text, file
        assert set(re.findall(r"pip install [^\n]*'\.\[([a-z-]+)\]'", text)) <= extras, file


def anchors(page: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_penstock_command_of_a_code_block_is_accepted_by_the_command_line(page: Path) -> None:
    for command in commands(page.read_text()):
        make_parser().parse_args(shlex.split(command, comments=True)[1:])


def commands(page: str) -> list[str]:
    """The commands of fenced and indented blocks; a backslash continues a line, && joins two."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (.*)$", page, flags=re.MULTILINE)
    lines = "\n".join([*blocks, *indented]).replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines for part in line.split(" && ") if part.strip().startswith("penstock ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_script_that_a_command_names_exists(page: Path) -> None:
    text = page.read_text()
    for script in re.findall(r"\bpython (?!-)(\S+\.py)", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"\bpython -m (\w[\w.]*)", text):
        path = Path(*module.split("."))
        exists = any(
            (root / path).is_dir() or (root / path).with_suffix(".py").exists() for root in (ROOT, ROOT / "src")
        )
        assert exists or module in OTHER_MODULES, module


OTHER_MODULES = {"pytest", "sglang.launch_server"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_of_the_tree_that_prose_names_exists(page: Path) -> None:
    """Paths in backquotes are relative to the root, to the package or to csrc."""
    folders = [
        folder.name for folder in (ROOT, ROOT / "src" / "penstock") for folder in folder.iterdir() if folder.is_dir()
    ]
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*\.(?:py|cpp|h|json))`", page.read_text()):
        if path.split("/")[0] in folders and "NAME" not in path:
            assert any((root / path).exists() for root in (ROOT, ROOT / "src" / "penstock")), path


def test_every_flag_that_a_page_names_exists() -> None:
    known = set(re.findall(r"--[a-z][\w-]+", make_parser().format_help()))
    for command in COMMANDS:
        known |= flags_of(command)
    named = {(page.stem, flag) for page in PAGES for flag in flags_in_prose(page.read_text())}
    named -= {("coming-from", flag) for flag in FOREIGN_FLAGS}
    assert {(page, flag) for page, flag in named if flag not in known | OTHER_FLAGS} == set()


OTHER_FLAGS = {"--help", "--parts", "--measure", "--isa"}
"""Flags of argparse, and of the benchmark or module that the prose names."""


def flags_of(command: str) -> set[str]:
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    return set(commands.choices[command]._option_string_actions)


def flags_in_prose(page: str) -> set[str]:
    """Flags in backquotes, but not those of other programs' commands."""
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))
    ours = [text for text in quoted if re.match(r"--|penstock |serve |generate |quantize ", text)]
    return {flag for text in ours for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)}


def test_troubleshooting_quotes_messages_that_penstock_has() -> None:
    """A row begins with the message; parts of it that vary are left out between backquotes."""
    sources = "".join((file.read_text()) for file in (ROOT / "src").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # joined literals
    (rows,) = tables((ROOT / "docs" / "troubleshooting.md").read_text())
    for row in rows[2:]:
        for quoted in re.findall(r"`([^`]+)`", row.split("|")[1]):
            assert quoted in sources or quoted in NOT_OURS, quoted


NOT_OURS = {"No matching distribution found for penstock", "nvidia-*", "length", "has neither model.safetensors nor"}


def test_the_index_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w.-]+)", (ROOT / "docs" / "index.md").read_text()))
    assert {file.name for file in (ROOT / "docs").iterdir() if file.is_file()} - {"index.md"} <= linked | {
        "performance.svg",
        "quality.svg",
    }


def test_the_configuration_for_production_has_options_that_exist() -> None:
    block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "production.md").read_text(), re.DOTALL)
    assert block is not None
    assert {"--" + name.replace("_", "-") for name in re.findall(r"^(\w+) =", block[1], re.MULTILINE)} <= flags_of(
        "serve"
    )


OUR_OWN_WORDS = {
    r"refused by name": "rejected with an error that names it",
    r"\bthe kit\b": "the folder or package that is meant",
    r"(in|had) another (hour|round|run)": "the newest figures alone",
    r"(that|do not|not) pays?\b": "is (not) faster",
    r"(?<!requests_)hand(ed)? on\b": "hand over",
    r"[Tt]he target (is|of)": "what was measured",
    r"processor multiplies": "CPUs with native bfloat16 instructions",
    r"[Tt]GI's dialect|[Aa]nthropic's dialect|OpenAI's dialect": "API",
}
"""Words that only its authors know, and the field's."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "architecture"], ids=lambda page: page.stem)
def test_pages_for_users_have_the_words_of_the_field(page: Path) -> None:
    text = " ".join(page.read_text().split())
    assert [f"{word}: write {ours}" for word, ours in OUR_OWN_WORDS.items() if re.search(word, text)] == []
