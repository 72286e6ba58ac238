"""The gate fails where the native library could have been built and was not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.library import COMPILERS, explain_missing_library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux")


@pytest.fixture
def with_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment with a compiler."""
    compiler = tmp_path / "bin" / COMPILERS[0]
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    return {"PATH": str(compiler.parent)}


def test_a_library_that_a_compiler_could_have_made_is_missed(tmp_path: Path, with_compiler: dict[str, str]) -> None:
    explained = explain_missing_library(tmp_path / "libpenstock.so", with_compiler)
    assert explained is not None
    assert "libpenstock.so is missing, although there is a compiler" in explained
    assert "cmake --build" in explained


def test_where_there_is_one_or_none_is_wanted_or_can_be_made_nothing_is_missed(
    tmp_path: Path, with_compiler: dict[str, str]
) -> None:
    absent, present = tmp_path / "absent.so", tmp_path / "present.so"
    present.touch()
    assert explain_missing_library(present, with_compiler) is None
    assert explain_missing_library(absent, with_compiler | {"PENSTOCK_LIBRARY": str(present)}) is None
    assert explain_missing_library(absent, with_compiler | {"PENSTOCK_ISA": "reference"}) is None
    assert explain_missing_library(absent, {"PATH": str(tmp_path)}) is None


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no compiler here")
def test_a_run_of_the_tests_without_the_library_fails_and_says_why(tmp_path: Path) -> None:
    environment = os.environ | {"PENSTOCK_LIBRARY": str(tmp_path / "libpenstock.so")}
    environment.pop("PENSTOCK_ISA", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/system/test_host.py"]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=root, timeout=120)
    assert run.returncode != 0
    assert "the tests of the native kernels would be skipped" in run.stdout + run.stderr
