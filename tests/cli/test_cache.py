"""`penstock cache`: what is cached is listed with its model, and deleted."""

import re
from pathlib import Path

import pytest

from penstock import LLM
from penstock.cli import main
from penstock.models.loading import packed_key
from tests.support.needs import needs_native


def test_an_empty_cache_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "none")
    assert main(["cache", "--packed-cache", folder]) == 0
    assert capsys.readouterr().out == f"{folder}: no packed weights\n"
    assert main(["cache", "--packed-cache", folder, "--clear"]) == 0
    assert capsys.readouterr().out == f"{folder}: deleted 0 files, 0 bytes\n"
    assert main(["cache", "--packed-cache", "off"]) == 2
    assert "packed_cache is off" in capsys.readouterr().err


def test_the_folder_is_that_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/penstock/packed: no packed weights\n"
    monkeypatch.setenv("PENSTOCK_PACKED_CACHE", str(tmp_path / "x"))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/x: no packed weights\n"


@needs_native
def test_a_model_that_was_cached_is_listed_and_deleted(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_key, "MIN_BYTES", 0)
    folder = str(tmp_path / "packed")
    LLM(str(tiny_llama), kv_cache_memory="8MiB", threads=1, packed_cache=folder, quantization="int8").close()
    assert main(["cache", "--packed-cache", folder]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{folder}: 1 file, [\d.]+ MiB, of at most [\d.]+ GiB", heading)
    assert re.fullmatch(rf" *[\d.]+ MiB  [\d: -]+  {tiny_llama.name}, int8 \({tiny_llama}\)", line)
    assert main(["cache", "--packed-cache", folder, "--clear"]) == 0
    assert "deleted 1 file, " in capsys.readouterr().out
    assert not list((tmp_path / "packed").glob("*.packed"))
