"""`tools/gpu_day.py` without a GPU: no part costs another, the page is complete, and all that can runs on the CPU."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_docs import num_cells, tables
from tests.support.needs import needs_torch
from tests.tools.gpu_parts import part
from tools import gpu_day
from tools.gpu.parts import PARTS, SECTIONS
from tools.gpu.prepare import THERE, requirements
from tools.gpu.runner import Runner

ROOT = Path(__file__).resolve().parents[2]


def run(out: Path, *parts: Any, seconds: float = 100.0) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit code, the parts by name, and the page."""
    code = Runner(out, "cpu", seconds).run(parts)
    results = json.loads((out / "gpu_day.json").read_text())
    return code, {each["name"]: each for each in results["parts"]}, (out / "gpu_day.md").read_text()


def test_a_part_that_raises_hangs_or_dies_costs_no_other(tmp_path: Path) -> None:
    bad = [part("raises", 1), part("hangs", 2, seconds=2.0), part("dies", 2), part("lacks-a-package", 3)]
    code, found, _ = run(tmp_path, *bad, part("is-unavailable", 3), part("measures", 4))
    assert code == 1
    assert {name: each["status"] for name, each in found.items()} == {
        "raises": "failed",
        "hangs": "timeout",
        "dies": "died",
        "lacks-a-package": "unavailable",
        "is-unavailable": "unavailable",
        "measures": "ok",
    }
    assert found["raises"]["reason"] == "ValueError: this is wrong here"
    assert "ValueError" in found["raises"]["output"]
    assert found["hangs"]["reason"] == "stopped after 2 s"
    assert found["dies"]["reason"] == "its process ended by SIGSEGV"
    assert "no_such_package_anywhere is missing" in found["lacks-a-package"]["reason"]
    assert found["measures"]["facts"]["device"] == "cpu"


def test_what_a_part_found_before_it_went_wrong_is_kept(tmp_path: Path) -> None:
    _, found, page = run(tmp_path, part("raises", 1), part("dies", 2))
    assert found["raises"]["facts"] == {"before": 1}
    assert found["dies"]["facts"] == {"before": 3}
    assert page.count("| before |") == 2


def test_a_part_that_is_stopped_takes_its_processes_along(tmp_path: Path) -> None:
    _, found, _ = run(tmp_path, part("hangs", 1, seconds=2.0))
    child = Path(f"/proc/{found['hangs']['facts']['before']}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_parts_share_the_time_of_the_run(tmp_path: Path) -> None:
    _, found, _ = run(tmp_path, part("hangs", 1), part("measures", 1), seconds=7.0)
    assert found["hangs"]["reason"] == "stopped after 7 s"
    assert found["measures"]["status"] == "skipped"


def test_a_part_that_needs_a_gpu_says_so(tmp_path: Path) -> None:
    code, found, page = run(tmp_path, part("measures", 3, needs_gpu=True))
    assert code == 0
    assert found["measures"]["reason"] == "needs a GPU"
    assert "`measures`: unavailable: needs a GPU" in page


def test_the_page_has_every_part_its_rates_and_what_did_not_hold(tmp_path: Path) -> None:
    parts = [part("knows-the-memory", 1), part("knows-the-rate", 1), part("measures", 3), part("raises", 4)]
    memory, rates = ((each, name) for each, name in zip(parts[:2], ("bandwidth", "rates"), strict=True))
    renamed = [
        type(each)(name, each.section, each.title, each.function, each.seconds) for each, name in (memory, rates)
    ]
    _, _, page = run(tmp_path, *renamed, *parts[2:])
    for each in (*renamed, *parts[2:]):
        assert f"### {each.title}" in page
    for section, title in SECTIONS.items():
        assert f"## {section}. {title}" in page
    assert "| a \\| b | **no** | 4,000 | 2 | 1e-06 | 50% |" in page  # 8 MB at 4 GB/s would take 2 ms of these 4
    assert "- `measures`: not exact: work a \\| b" in page
    for rows in tables(page):
        assert len({num_cells(row) for row in rows}) == 1, rows


def test_every_part_is_listed_once_and_its_function_exists() -> None:
    assert len({each.name for each in PARTS}) == len(PARTS)
    for each in PARTS:
        module, _, function = each.function.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^def {function}\(place: Place\)", source, re.M), each.name
        assert each.section in SECTIONS


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_day.main(["--parts", "machine,bandwith"]) == 2
    assert "no part is called bandwith; there are machine, bandwidth" in capsys.readouterr().out


def test_wheels_are_those_of_penstock_without_what_the_machine_brings() -> None:
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements()}
    assert {"msgspec", "pyzmq", "tokenizers", "fastapi"} <= names
    assert not names & set(THERE)


def test_a_folder_without_wheels_fails_alone(tmp_path: Path) -> None:
    code = Runner(tmp_path / "out", "cpu", 60.0, wheels=tmp_path).run([part("measures", 1)])
    found = {each["name"]: each for each in json.loads((tmp_path / "out" / "gpu_day.json").read_text())["parts"]}
    assert code == 1
    assert found["wheels"]["reason"] == f"{tmp_path} has no wheels"
    assert found["measures"]["status"] == "ok"


@needs_torch
def test_the_command_runs_the_parts_that_it_is_asked_for(tmp_path: Path) -> None:
    assert gpu_day.main([str(tmp_path), "--device", "cpu", "--parts", "machine"]) == 0
    (found,) = json.loads((tmp_path / "gpu_day.json").read_text())["parts"]
    assert (found["name"], found["status"]) == ("machine", "ok")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(600)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tools.gpu_forks", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = {each["name"]: each for each in json.loads((tmp_path / "gpu_day.json").read_text())["parts"]}
    assert list(found) == [each.name for each in PARTS]
    for name, each in found.items():
        assert each["status"] == ("unavailable" if each.get("reason") == "needs a GPU" else "ok"), (name, each)
        for rows in each["facts"].values():
            for row in rows if isinstance(rows, list) else []:
                assert "error" not in row, (name, row)
                assert not any(value is False for value in row.values()), (name, row)
    assert {each.name for each in PARTS if each.needs_gpu} == {"launches", "lost_context", "vllm"}
