"""`penstock doctor` reports what a machine has and lacks, and what to run."""

import json
import re
from pathlib import Path

import pytest

from penstock import native
from penstock.cli import doctor, main
from penstock.errors import NativeLibraryError

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_a_working_machine_has_no_fault_and_the_demo_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"version", "processor", "kernels", "memory", "models", "extras", "demo model"} <= findings.keys()
    assert "95" in findings["demo model"]["text"]


def test_a_fault_is_the_exit_code_and_its_remedy_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise NativeLibraryError("built from other sources")

    monkeypatch.setattr(native, "library", broken)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_kernels,))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "✗ kernels  built from other sources"


def test_a_better_instruction_set_than_those_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Built:
        instruction_set = "avx2"
        built = ("avx2",)

    monkeypatch.delenv("PENSTOCK_ISA", raising=False)
    monkeypatch.setattr(native, "library", Built)
    monkeypatch.setattr(doctor, "_cpuinfo", {"flags": "fma avx2 f16c avx512f avx512bw avx512dq avx512vl"}.get)
    (found,) = doctor.check_kernels()
    assert (found.state, found.text) == ("note", "native, avx2 (built: avx2); this processor also has avx512")


def test_a_full_disk_and_a_folder_without_rights_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "made yet"))
    monkeypatch.setenv("PENSTOCK_PACKED_CACHE", "off")
    monkeypatch.setattr(doctor, "FREE_DISK", 1 << 60)
    (found,) = doctor.check_disk()
    assert (found.state, found.topic) == ("note", "models")


def test_every_extra_is_looked_for() -> None:
    extras = re.findall(
        r"^([a-z-]+) = \[", PYPROJECT.read_text().split("optional-dependencies]")[1].split("\n[")[0], re.M
    )
    assert set(extras) - {"dev", "ray-serve"} == set(doctor.EXTRAS)
