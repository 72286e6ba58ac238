"""Created models on disk, when the process that changes them is killed, and when others change them meanwhile.

What they are for clients: `tests/server/test_ollama_create.py`.
"""

import os

import pytest

from penstock.checkpoint import created
from penstock.checkpoint.checkpoint import DEMO_FOLDER
from penstock.checkpoint.summary import summary_of
from penstock.config.engine_config import EngineConfig
from penstock.errors import CheckpointError
from penstock.frontend.served_model import identity_of
from tests.support.kills import run_killed

KILLED = """
import shutil
from penstock.checkpoint.created import *
from penstock.checkpoint.created import RECIPE

def make(name, system, digest):
    name_created(write_created({"model.gguf": blob_path(digest)}, Recipe(system=system)), name)

def replace():
    make("m", "new", "b" * 64)

def delete():
    remove_created("m")

def check(name, systems):
    found = find_created(name)
    assert None in systems or found is not None, name
    if found is None:
        return None
    assert all(path.is_file() for path in created_files(found).values()), name
    recipe = recipe_of(found)
    assert recipe.system in systems
    return recipe.system

total = 0
for change, after in ((replace, "new"), (delete, None)):
    for killed_at in range(200):
        shutil.rmtree(folder, ignore_errors=True)
        blob_path("x").parent.mkdir(parents=True)
        for digest in "ab":
            blob_path(digest * 64).write_text(digest)
        make("m", "old", "a" * 64)
        make("other", "other", "a" * 64)
        done = killed(killed_at, change)
        check("other", ("other",))
        now = check("m", ("old", after))
        assert not done or now == after
        assert [model.name for model in created_models()] == (["m"] if now else []) + ["other"]
        assert not [one for one in blob_path("x").parent.parent.glob("created/.*") if not one.name.startswith(".new-")]
        change()
        check("m", (after,))
        check("other", ("other",))
        total += 1
        if done:
            break
print(total)
"""


def test_a_model_is_whole_whichever_step_of_its_replacement_or_deletion_is_the_last(tmp_path):
    assert run_killed(KILLED, tmp_path) > 15


def test_an_upload_that_was_deleted_meanwhile_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"model.gguf was deleted meanwhile"):
        created.write_created({"model.gguf": created.blob_path("a" * 64)}, created.Recipe())


def test_another_model_in_the_place_of_one_is_told_apart(tmp_path, monkeypatch, tiny_llama):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    seen = set()
    for left_out in ("", "generation_config.json"):
        files = {file.name: file for file in tiny_llama.iterdir() if file.name != left_out}
        path = created.name_created(created.write_created(files, created.Recipe()), "mario")
        os.utime(path, (0, len(files)))
        config = EngineConfig.from_options(model="mario")
        seen.add((identity_of(config), created.version_of(path)))
    assert len(seen) == 2
    assert created.version_of(tiny_llama) == ""


def test_a_summary_is_that_of_the_files_that_are_there_now(tmp_path, monkeypatch, tiny_llama):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for source, now in ((tiny_llama, 1), (DEMO_FOLDER, 2)):
        files = {file.name: file for file in source.iterdir() if file.is_file()}
        path = created.name_created(created.write_created(files, created.Recipe()), "mario")
        os.utime(path, (now, now))
        assert summary_of(str(path)).num_bytes == summary_of(str(source)).num_bytes


def test_adapters_of_one_name_do_not_destroy_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    blob = created.blob_path("a" * 64)
    blob.parent.mkdir(parents=True)
    blob.touch()
    owner = tmp_path / "added.json"
    first, second = (created.name_adapter(created.write_adapter({"x.gguf": blob}, owner), "a/b:1") for _ in range(2))
    created.remove_adapter(first)
    assert (second / "x.gguf").exists()
    created.remove_adapter(second)
    assert not blob.exists()
