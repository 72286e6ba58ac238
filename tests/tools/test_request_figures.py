"""docs/architecture.md names the files of one chat request, and how much of them it runs: no more than it says."""

import asyncio
import inspect
import re
import time
from pathlib import Path

from penstock import native
from penstock.api.tools import arguments_text, template_id
from penstock.core.scheduler import Scheduler
from penstock.fleet.replica import Replica
from tools.request_figures import WATCH, Function, Trace, circles, figures, lines_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def test_the_page_names_the_files_of_a_chat_request_and_bounds_its_functions_and_lines(tiny_llama: Path) -> None:
    section = re.search(r"^## The files of a request\n(.*?)```\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    text = section[1].replace("\n", " ")
    bounds = re.search(r"at most (\d+) functions of ([\d,]+) lines.*at most (\d+) calls", text)
    assert bounds is not None
    if native.library() is None:  # then the model runs eagerly, on the reference
        return
    found = figures(tiny_llama)
    assert set(found.files) == {file for file in section[2].split() if file.endswith(".py")}
    for name, count, bound in (
        ("functions", len(found.functions), int(bounds[1])),
        ("lines", lines_of(found.functions), int(bounds[2].replace(",", ""))),
    ):
        assert 0.97 * bound <= count <= bound, f"{count} {name}: change the page, and say why there are more"
    assert found.calls_per_token <= int(bounds[3]), "a token takes more calls: change the page, and say why"


def test_the_look_for_an_engine_that_hangs_is_no_part_of_a_request(tmp_path: Path) -> None:
    assert hasattr(Replica, WATCH)

    async def _await_hang() -> None:
        while True:
            time.monotonic()  # a call of C is no end of the look
            template_id("seen by the look alone")
            await asyncio.sleep(0)

    async def ask() -> None:
        look = asyncio.create_task(_await_hang())
        with Trace(tmp_path / "listing"):
            await asyncio.sleep(0)
            arguments_text("{}", "arguments")
        look.cancel()

    asyncio.run(ask())
    assert [line.split()[2] for line in (tmp_path / "listing").read_text().splitlines()] == ["arguments_text"]


def test_no_two_modules_import_each_other() -> None:
    assert circles() == []


def test_a_comment_on_a_line_of_its_own_makes_a_function_no_longer() -> None:
    source, first = inspect.getsourcelines(Scheduler.schedule)
    comments = sum(line.lstrip().startswith("#") for line in source)
    assert comments >= 2
    assert lines_of([Function("core/scheduler.py", first, "schedule")]) == len(source) - comments
