"""`penstock pull`, `list`, `show` and `rm`, against a server that plays the hub, and without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.checkpoint import created
from penstock.checkpoint.added import Added, AddedAdapter, file_of_address
from penstock.checkpoint.aliases import add_alias, aliases_file, read_aliases
from penstock.checkpoint.checkpoint import resolve_path
from penstock.checkpoint.hub_cache import CachedModel
from penstock.cli import main, rm
from penstock.errors import ConfigError
from tests.support.gguf_files import write_gguf
from tests.support.hub import etag, hub

COMMIT = "1" * 40
RUN = """
import json, sys
from pathlib import Path
from penstock.checkpoint import checkpoint, hub_download, hub_pull
from penstock.cli import main
hub_download.LARGE = 1000
for command in json.loads(sys.argv[1]):
    if command[0] == "damage":
        blob = Path(command[1])
        content = blob.read_bytes()
        blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        continue
    print("$", *command, flush=True)
    checkpoint._download_once.cache_clear()  # as if each command had a process of its own
    print("=", hub_pull.main(command[1]) if command[0] == "hub_pull" else main(command), flush=True)
"""


def run(endpoint: str, cache: Path, *commands: list[str]) -> list[str]:
    """What each command prints, with errors, and its exit code at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", RUN, json.dumps(commands)]
    ran = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return ran.stdout.split("$ ")[1:]


def test_a_model_is_pulled_checked_named_and_deleted(tiny_llama: Path, tmp_path: Path) -> None:
    remote, cache = tmp_path / "hub" / COMMIT, tmp_path / "cache"
    remote.mkdir(parents=True)
    for kind in ("F16", "F32"):
        write_gguf(remote / f"tiny-{kind}.gguf", tiny_llama, kind)
    file = remote / "tiny-F16.gguf"
    blob = cache / "models--some--repo" / "blobs" / etag(file)
    blob.parent.mkdir(parents=True)
    half = file.stat().st_size // 2
    blob.with_name(f"{blob.name}.part").write_bytes(file.read_bytes()[:half])  # an earlier pull was interrupted
    sent: list[tuple[str, str]] = []
    pull = ["pull", "some/repo:F16", "--as", "tiny"]
    with hub(tmp_path / "hub", {"main": COMMIT}, sent) as endpoint:
        served, first, listed, shown, damaged, again = run(
            endpoint,
            cache,
            ["hub_pull", "some/repo:F16"],
            pull,
            ["list"],
            ["show", "tiny"],
            ["damage", str(blob)],
            pull,
            pull,
        )
    lines = [json.loads(line) for line in served.splitlines() if line.startswith("{")]
    whole, size = f"sha256:{etag(file)}", file.stat().st_size
    assert lines[0] == {"digest": whole, "total": size, "completed": half}
    assert lines[-3:-1] == [
        {"digest": whole, "total": size, "completed": size},
        {"status": "verifying sha256 digest"},
    ]
    assert Path(lines[-1]["path"]).name == "tiny-F16.gguf"
    assert first.endswith("tiny: another name of some/repo:F16\n= 0\n"), first
    assert sent[0] == ("tiny-F16.gguf", f"bytes={half}-")
    assert {name for name, _ in sent} == {"tiny-F16.gguf"}
    assert listed.splitlines()[1].startswith("some/repo:F16 ")
    assert listed.splitlines()[1].endswith("main")
    assert "tiny: some/repo:F16" in listed
    assert "gguf F16" in shown
    assert "differs from the hub's checksum" in damaged
    assert damaged.endswith("= 2\n")
    assert again.endswith("= 0\n"), again
    offline, removed, gone, missing, empty = run(
        "http://127.0.0.1:9", cache, pull, ["rm", "tiny"], ["rm", "some/repo:F16"], ["rm", "some/repo:F16"], ["list"]
    )
    assert "the hub gives no list of its files" in offline
    assert offline.endswith("= 0\n"), offline
    assert "deleted the short name" in removed
    assert "some/repo:F16: deleted" in gone
    assert "no model some/repo:F16 is in the hub's cache" in missing
    assert "no models yet" in empty
    assert not blob.exists()


def test_a_vision_file_belongs_to_each_model_beside_it_and_goes_with_the_last(tiny_llama: Path, tmp_path: Path) -> None:
    remote, cache = tmp_path / "hub" / COMMIT, tmp_path / "cache"
    remote.mkdir(parents=True)
    for kind in ("F16", "F32"):
        write_gguf(remote / f"tiny-{kind}.gguf", tiny_llama, kind)
    (remote / "mmproj-F16.gguf").write_bytes(b"a vision file" * 100)
    listing = ["list", "--json"]
    with hub(tmp_path / "hub", {"main": COMMIT}, []) as endpoint:
        *_, both, removed, one, _, none = run(
            endpoint,
            cache,
            ["pull", "some/repo:F16"],
            ["pull", "some/repo:F32"],
            listing,
            ["rm", "some/repo:F16"],
            listing,
            ["rm", "some/repo:F32"],
            listing,
        )
    sizes = {model["model"]: model["bytes"] for model in json.loads(both.splitlines()[1])["models"]}
    assert sizes == {
        f"some/repo:{kind}": (remote / f"tiny-{kind}.gguf").stat().st_size + 1300 for kind in ("F16", "F32")
    }
    assert removed.endswith("= 0\n"), removed
    (left,) = json.loads(one.splitlines()[1])["models"]
    assert (left["model"], left["bytes"]) == ("some/repo:F32", sizes["some/repo:F32"])
    assert json.loads(none.splitlines()[1])["models"] == []


def test_an_alias_names_a_path_and_a_path_comes_first(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    add_alias("tiny", str(tiny_llama))
    assert resolve_path("tiny") == tiny_llama.resolve()
    (tmp_path / "here").mkdir()
    for name, said in (("here", "choose another alias"), ("a/b", "an alias must be")):
        with pytest.raises(ConfigError, match=said):
            add_alias(name, "some/repo")
    aliases_file().write_text("[1")
    with pytest.raises(ConfigError, match="mend or delete the file"):
        read_aliases()


def test_what_clients_added_to_servers_is_listed_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    file = file_of_address(11434)
    assert file is not None
    added = Added(("org/repo",)).with_name("chat", "org/repo").with_adapter("sql", AddedAdapter("org/repo", "/sql"))
    file.change(lambda _: added)
    (file.path.parent / "port-1.json").write_text("{")
    assert main(["list"]) == 0
    told = capsys.readouterr()
    assert "port-1.json, the list of added models, cannot be read" in told.err
    assert told.out.splitlines()[-3:] == [
        "org/repo: added, in the server of port-11434",
        "chat: org/repo, in the server of port-11434",
        "sql: adapter of org/repo, in the server of port-11434",
    ]
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["servers"]["port-11434"]["names"] == {"chat": "org/repo"}
    for name in ("chat", "sql"):
        assert main(["rm", name]) == 0
    assert file.read() == Added(("org/repo",))
    cached = [CachedModel("org/repo", commit * 40, (), tmp_path, (), 1, 0.0) for commit in "12"]
    monkeypatch.setattr(rm, "find_cached", lambda _name, _revision: cached[0])
    monkeypatch.setattr(rm, "remove_cached", cached.remove)
    monkeypatch.setattr(rm, "cached_models", lambda: cached)
    for left in (("org/repo",), ()):
        assert main(["rm", "org/repo", "--revision", cached[0].commit]) == 0
        assert file.read().models == left


def test_a_created_model_goes_with_its_last_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"weights")
    folder = created.name_created(created.write_created({"model.gguf": weights}, created.Recipe()), "mario")
    first, second = file_of_address(11434), file_of_address(11435)
    assert first is not None
    assert second is not None
    first.change(lambda _: Added(("mario",)).with_name("luigi", "mario").with_name("chat", "mario"))
    second.change(lambda _: Added(("mario",)))
    assert main(["rm", "mario:latest"]) == 0
    kept = "mario: deleted the name; its files stay for its other names: luigi in the server of port-11434, chat in"
    assert kept in capsys.readouterr().out
    assert first.read() == Added(("mario",), {"luigi": "mario", "chat": "mario"}, deleted=("mario",))
    assert second.read() == Added()
    assert main(["rm", "mario"]) == 2
    assert "which are to be deleted first: luigi in the server of port-11434" in capsys.readouterr().err
    assert main(["rm", "luigi"]) == 0
    assert folder.is_dir()
    assert main(["rm", "chat"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("mario: deleted")
    assert first.read() == Added()
    assert not folder.exists()


def test_the_name_of_a_created_model_that_is_served_by_its_own_is_deleted_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its own in the options or in the list of another server."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = created.name_created(created.write_created({}, created.Recipe()), "mario")
    by_options, others = file_of_address(11434), file_of_address(11435)
    assert by_options is not None
    assert others is not None
    by_options.change(lambda _: Added().with_name("chat", "mario"))
    assert main(["rm", "mario"]) == 2
    assert main(["rm", "chat"]) == 0
    assert folder.is_dir()
    by_options.change(lambda _: Added(("mario",), {"chat": "mario"}, deleted=("mario",)))
    others.change(lambda _: Added(("mario",)))
    assert main(["rm", "chat"]) == 0
    assert by_options.read() == Added()
    assert folder.is_dir()
    assert main(["rm", "mario"]) == 0
    assert not folder.exists()
