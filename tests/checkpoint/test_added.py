"""The files of what servers were given: many servers and commands change them at once, and any may be killed."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.added import Added, AddedAdapter, AddedFile, added_files, file_of_address, forget, forget_name
from penstock.checkpoint.aliases import read_aliases
from penstock.checkpoint.created import created_models, find_created
from penstock.errors import CheckpointError
from tests.support.kills import run_killed

UPLOADED = """
import shutil
from functools import partial
from penstock.checkpoint.added import Added, AddedAdapter, AddedFile, forget_name, held_by_server, list_of
from penstock.checkpoint.created import blob_path, name_adapter, remove_adapter, write_adapter

file, other = AddedFile(folder / "added.json"), AddedFile(folder / "other.json")

def upload(to=file, name="sql"):
    path = name_adapter(write_adapter({"x.gguf": blob_path("a")}, list_of(to)), name)
    if to is not None:
        to.change(partial(Added.with_adapter, name=name, adapter=AddedAdapter("model", str(path))))

def delete():
    path = file.read().adapters["sql"].path
    file.change(partial(Added.without_name, name="sql"))
    remove_adapter(Path(path))

def start(of):
    with held_by_server(of):
        pass

def folders():
    return sorted(map(str, folder.glob("penstock/models/adapters/[!.]*")))

def listed():
    return sorted(one.path for each in (file, other) for one in each.read().adapters.values())

left, total = 0, 0
for change in (upload, delete):
    for killed_at in range(100):
        shutil.rmtree(folder / "penstock", ignore_errors=True)
        for each in (file, other):
            each.path.unlink(missing_ok=True)
        blob_path("a").parent.mkdir(parents=True)
        blob_path("a").touch()
        upload(other, "theirs")
        if change is delete:
            upload()
        done = killed(killed_at, change)
        before = folders()
        left += before != listed()
        with held_by_server(file):  # which runs, and is in the middle of a change
            running = folders()
            start(file)
            assert folders() == running
            start(other)
            start(None)
            assert folders() == running
        start(file)
        assert folders() == listed()
        assert Path(other.read().adapters["theirs"].path, "x.gguf").exists()
        total += 1
        if done:
            break
upload(None, "unlisted")
start(file)
start(other)
assert folders() != listed()
start(None)
assert folders() == listed()
assert left > 1
print(total)
"""
NAMES = st.sampled_from("abc")
CHANGES = st.one_of(
    st.tuples(
        st.sampled_from([Added.with_model, Added.without_model, Added.without_own_name, Added.without_name]), NAMES
    ).map(lambda drawn: partial(drawn[0], name=drawn[1])),
    st.tuples(NAMES, NAMES).map(lambda drawn: partial(Added.with_name, name=drawn[0], model=drawn[1])),
    st.tuples(NAMES, NAMES).map(
        lambda drawn: partial(Added.with_adapter, name=drawn[0], adapter=AddedAdapter(drawn[1], "/path"))
    ),
)
KILLED = """
from functools import partial
from penstock.checkpoint.added import Added, AddedFile

file = AddedFile(folder / "added.json")
for killed_at in range(100):
    before, name = file.read(), f"model-{killed_at}"
    done = killed(killed_at, lambda: file.change(partial(Added.with_model, name=name)))
    assert file.read() in (before, before.with_model(name))
    if done:
        assert file.read().models[-1] == name
        break
print(killed_at)
"""


@given(changes=st.lists(CHANGES, max_size=20))
def test_each_name_has_one_meaning(changes):
    added = Added()
    for change in changes:
        added = change(added)
        assert len(set(added.models)) == len(added.models)
        assert not added.names.keys() & added.adapters.keys()
        assert len(set(added.deleted)) == len(added.deleted)
        assert all(name in added.models and added.names_of(name) for name in added.deleted)


def test_a_model_whose_own_name_was_deleted_goes_with_its_last_name():
    added = Added().with_model("a").with_name("b", "a").with_adapter("sql", AddedAdapter("a", "/path"))
    without = added.without_own_name("a")
    assert without == replace(added, deleted=("a",))
    assert without.with_name("a", "a") == without.with_model("a") == added
    assert without.without_name("b") == added.without_name("b").without_own_name("a") == Added()


def test_files_of_older_versions_are_read(tmp_path):
    file = AddedFile(tmp_path / "added.json")
    file.path.write_text('{"models": ["a"], "names": {"b": "a"}, "adapters": {}}')
    assert file.read() == Added(("a",), {"b": "a"})


def test_a_file_is_whole_whichever_step_of_a_change_is_the_last(tmp_path):
    assert run_killed(KILLED, tmp_path) >= 4, "steps between which it was killed"


def test_uploaded_adapters_that_a_killed_server_left_are_deleted_by_the_next_one_of_its_list(tmp_path):
    assert run_killed(UPLOADED, tmp_path) > 15


def test_servers_of_one_file_keep_each_others_changes(tmp_path):
    path = tmp_path / "added.json"

    def serve(server):
        for number in range(10):
            AddedFile(path).change(partial(Added.with_model, name=f"{server}-{number}"))

    with ThreadPoolExecutor(4) as servers:
        list(servers.map(serve, range(4)))
    assert len(AddedFile(path).read().models) == 40


def test_each_port_and_socket_has_a_file_of_its_own_unless_any_port_will_do():
    assert file_of_address(0) is None
    paths = {file_of_address(port, uds).path for port, uds in ((1, None), (2, None), (1, "/a"), (1, "/b"))}
    assert len(paths) == 4


@pytest.mark.parametrize("content", ["", "[]", '{"models": [1], "names": {}, "adapters": {}}', "[" * 10_000])
def test_a_damaged_file_is_named_and_not_written_over(tmp_path, content):
    file = AddedFile(tmp_path / "added.json")
    file.path.write_text(content)
    with pytest.raises(CheckpointError, match="mend or delete it"):
        file.read()
    with pytest.raises(CheckpointError, match="mend or delete it"):
        file.change(partial(Added.with_model, name="a"))
    assert file.path.read_text() == content


def test_without_a_home_nothing_was_added(tmp_path):
    (tmp_path / "home").touch()
    assert AddedFile(tmp_path / "home" / "servers" / "port-1.json").read() == Added()


def test_in_a_home_that_may_not_be_entered_nothing_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def stat(path, **_options):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "stat", stat)
    assert (added_files(), created_models(), find_created("a"), read_aliases()) == ([], [], None, {})


def test_a_path_may_be_no_unicode(tmp_path):
    file, adapter = AddedFile(tmp_path / "added.json"), AddedAdapter("a", "/ä/\udcff")
    file.change(partial(Added.with_adapter, name="sql", adapter=adapter))
    assert file.read().adapters == {"sql": adapter}


def test_what_is_deleted_by_commands_is_in_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    damaged = file_of_address(0, "/damaged").path
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    ours = AddedAdapter("mario", str(Path(tmp_path, "elsewhere")))
    for port in (1, 2):
        file = file_of_address(port)
        for change in (
            partial(Added.with_model, name="hf.co/org/repo"),
            partial(Added.with_model, name="mario"),
            partial(Added.with_name, name="chat", model="mario"),
            partial(Added.with_adapter, name="sql", adapter=ours),
        ):
            file.change(change)
    forget(["org/repo"])
    assert forget_name("chat") == []
    assert forget_name("chat") is None
    assert [file_of_address(port).read() for port in (1, 2)] == [Added(("mario",), {}, {"sql": ours})] * 2
    forget(["mario"])
    assert damaged.read_text() == "{"
    damaged.unlink()
    assert [file.read() for file in added_files()] == [Added()] * 2
