"""Folders of ranks: only those of killed engines are removed."""

import os
import tempfile
from pathlib import Path

import pytest

from penstock.runner.rank_folder import RankFolder, remove_abandoned

DEAD = 2**22 + 1
"""No process has this number."""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_engine_removes_the_folder_of_a_dead_one_and_keeps_that_of_a_living_one(temporary: Path) -> None:
    first = RankFolder()
    dead = temporary / f"penstock-ranks-{DEAD}-abc"
    dead.mkdir()
    (dead / "rendezvous").touch()
    second = RankFolder()
    assert sorted(temporary.iterdir()) == sorted(map(Path, (first.path, second.path)))
    first.remove()
    first.remove()
    second.remove()
    assert not list(temporary.iterdir())


def test_one_that_a_process_of_another_container_has_locked_is_kept(temporary: Path) -> None:
    folder = RankFolder()
    there = temporary / f"penstock-ranks-{DEAD}-abc"
    os.rename(folder.path, there)
    remove_abandoned()
    assert there.exists()


@pytest.mark.parametrize("name", ["penstock-ranks-mine", "penstock-ranks-", f"other-{DEAD}-abc"])
def test_folders_of_other_names_are_kept(temporary: Path, name: str) -> None:
    (temporary / name).mkdir()
    remove_abandoned()
    assert (temporary / name).exists()


def test_a_link_is_not_followed(temporary: Path) -> None:
    kept = temporary / "kept"
    kept.mkdir()
    (temporary / f"penstock-ranks-{DEAD}-abc").symlink_to(kept)
    remove_abandoned()
    assert kept.exists()
