"""The library's choice of an instruction set."""

import functools
import json
import logging
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import native
from penstock.errors import ConfigError
from tests.support.needs import needs_torch

CHOICES = """
import json, os
from penstock import native
from penstock.errors import ConfigError
answers = {}
for name in ("", "sse9", *native.INSTRUCTION_SETS):
    os.environ["PENSTOCK_ISA"] = name
    native.library.cache_clear()
    try:
        answers[name] = native.library().instruction_set
    except ConfigError as error:
        answers[name] = str(error)
native.library.cache_clear()
os.environ["PENSTOCK_ISA"] = ""
built = native.library().built
print(json.dumps([answers, built]))
"""
needs_native = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built here")


@needs_native
def test_an_instruction_set_is_the_one_asked_for_or_refused() -> None:
    run = subprocess.run([sys.executable, "-c", CHOICES], capture_output=True, text=True, timeout=60, check=True)
    answers, built = json.loads(run.stdout)
    present = [name for name in native.INSTRUCTION_SETS if answers[name] == name]
    assert answers[""] == next(one for one in built if one in present)
    for name in ("sse9", *native.INSTRUCTION_SETS):
        missing = "the library was built without it (pip install -C cmake.define.PENSTOCK_SETS=all builds all)"
        refusal = (
            f"PENSTOCK_ISA={name}: "
            f"{missing if name != 'sse9' and name not in built else 'this machine does not have it'}; "
            f"leave it unset, or choose from {', '.join([*present, 'reference'])}"
        )
        assert answers[name] == (name if name in present else refusal)


@needs_torch
def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", "reference")
    assert native.library.__wrapped__() is None
    assert not caplog.records


@needs_torch
def test_a_missing_library_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delenv("PENSTOCK_LIBRARY", raising=False)
    monkeypatch.delenv("PENSTOCK_ISA", raising=False)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    library = functools.cache(native.library.__wrapped__)
    assert library() is library() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "4 to 15 times slower; the native ones were not built: install a C++ compiler" in caplog.text


@needs_torch
def test_other_platforms_are_told_which_have_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delenv("PENSTOCK_LIBRARY", raising=False)
    monkeypatch.delenv("PENSTOCK_ISA", raising=False)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    assert native.library.__wrapped__() is None
    assert "the native ones exist for Linux and macOS, not for Windows" in caplog.text


def test_a_library_that_the_environment_names_must_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libpenstock.so"
    monkeypatch.delenv("PENSTOCK_ISA", raising=False)
    monkeypatch.setenv("PENSTOCK_LIBRARY", str(path))
    with pytest.raises(
        ConfigError, match=r"PENSTOCK_LIBRARY=.*libpenstock\.so cannot be loaded: there is no such file"
    ):
        native.library.__wrapped__()
    path.write_text("no library")
    with pytest.raises(ConfigError, match=r"PENSTOCK_LIBRARY=.* cannot be loaded: .*leave it unset"):
        native.library.__wrapped__()
