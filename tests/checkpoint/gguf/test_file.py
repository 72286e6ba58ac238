"""Which file a model is in: single files, several that make one, and folders and repositories that hold some."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint import checkpoint
from penstock.checkpoint.checkpoint import open_checkpoint, resolve_path
from penstock.checkpoint.gguf.file import Metadata, choose_gguf, open_gguf, parts_of
from penstock.checkpoint.gguf.mmproj import wanted_files
from penstock.errors import CheckpointError
from tests.support.gguf_files import finish, write_gguf


def write(path: Path, **metadata: str) -> Path:
    writer = GGUFWriter(None, "llama")
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    writer.add_tensor("a", np.zeros(8, dtype=np.float32))
    finish(writer, path)
    return path


def write_split(folder: Path, name: str = "model") -> list[Path]:
    writer = GGUFWriter(None, "llama", split_max_tensors=1)
    for tensor in "abc":
        writer.add_tensor(tensor, np.full(8, ord(tensor), dtype=np.float32))
    finish(writer, folder / f"{name}.gguf")
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_files_that_make_one_model_are_opened_together(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    file = open_gguf(parts[0])
    assert file.files == tuple(parts)
    assert {name: info.file for name, info in file.tensors.items()} == dict(zip("abc", parts, strict=True))


def test_another_part_than_the_first_names_the_first(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    with pytest.raises(CheckpointError, match=r"not the first of the 3 files .*: give .*model-00001-of-00003\.gguf"):
        open_gguf(parts[1])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[2].unlink()
    with pytest.raises(
        CheckpointError, match=r"one of the 3 files of a split model; model-00003-of-00003\.gguf is miss"
    ):
        open_gguf(parts[0])


def test_parts_under_other_names_are_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="must be named NAME-00001-of-00003"):
        open_gguf(tmp_path / "renamed.gguf")


def test_a_part_of_another_model_is_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    shutil.copy(parts[0], parts[1])
    with pytest.raises(CheckpointError, match=r"the tensor 'a' is in .*00001.* and in .*00002"):
        open_gguf(parts[0])
    write(parts[1])
    with pytest.raises(CheckpointError, match=r"not belong to the same model .* its split.count is None"):
        open_gguf(parts[0])


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_what_is_no_model_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"no model: its general.type is '{kind}'"):
        open_gguf(write(tmp_path / "x.gguf", general__type=kind))


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf")
    assert resolve_path(str(tmp_path)) == file
    write(tmp_path / "mmproj-x.gguf", general__type="mmproj")
    assert resolve_path(str(tmp_path)) == file


def test_a_folder_with_the_parts_of_one_model_is_that_model(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    assert resolve_path(str(tmp_path)) == parts[0]


def test_a_folder_without_the_first_part_says_so(tmp_path: Path) -> None:
    write_split(tmp_path)[0].unlink()
    with pytest.raises(CheckpointError, match=r"has model-00002-of-00003\.gguf, .* lacks its first .*-00001-of-00003"):
        resolve_path(str(tmp_path))


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    write(tmp_path / "a-Q4_K_M.gguf")
    write(tmp_path / "a-Q8_0.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models; give one of .*: a-Q4_K_M\.gguf, a-Q8_0\.gguf"):
        resolve_path(str(tmp_path))


def test_safetensors_go_before_gguf_files(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf")
    (tmp_path / "model.safetensors").touch()
    assert resolve_path(str(tmp_path)) == tmp_path


def test_a_gguf_file_under_another_name_is_known_by_its_content(tmp_path: Path) -> None:
    blob = write(tmp_path / "x.gguf").rename(tmp_path / "sha256-0123")
    assert resolve_path(str(blob)) == blob


def test_the_model_is_called_as_its_file_is(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "Tiny-F32.gguf", tiny_llama)
    assert open_checkpoint(str(tmp_path / "Tiny-F32.gguf")).name == "Tiny-F32"
    assert open_checkpoint(str(tmp_path)).name == tmp_path.name
    write_gguf(tmp_path / "split" / "tiny.gguf", tiny_llama, split_after=9)
    assert open_checkpoint(str(tmp_path / "split")).name == "split"
    assert open_checkpoint(str(next((tmp_path / "split").glob("*00001*")))).name == "tiny"


NAMES = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf", "sub/m.q8_0.gguf"]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("F16", "m-F16-00001-of-00002.gguf"),
        ("Q8_0", "sub/m.q8_0.gguf"),
        ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
        ("sub/m.q8_0.gguf", "sub/m.q8_0.gguf"),
    ],
)
def test_a_file_is_chosen_by_its_name_or_how_that_ends(choice: str, chosen: str) -> None:
    assert choose_gguf(NAMES, choice, "here") == chosen


def test_the_parts_of_the_chosen_model_belong_together() -> None:
    assert parts_of(NAMES, "m-F16-00001-of-00002.gguf") == NAMES[2:4]
    assert parts_of(NAMES, "m-Q4_K_M.gguf") == ["m-Q4_K_M.gguf"]
    beside = ["mmproj-F16.gguf", "other/mmproj-F32.gguf"]
    assert wanted_files([*NAMES, *beside], "m-Q4_K_M.gguf") == ["m-Q4_K_M.gguf", "mmproj-F16.gguf"]


def test_vision_files_and_statistics_are_no_models() -> None:
    names = ["M.Q8_0.gguf", "M.mmproj-Q8_0.gguf", "M.mmproj-f16.gguf", "M.imatrix.gguf", "mmprojected-Q4_0.gguf"]
    assert choose_gguf(names, "Q8_0", "here") == "M.Q8_0.gguf"
    assert choose_gguf(names[1:], None, "here") == "mmprojected-Q4_0.gguf"
    of_statistics = ["imatrix_all.gguf", "M-imatrix.gguf"]
    assert choose_gguf([*of_statistics, "M-imatrix-Q4_0.gguf"], None, "here") == "M-imatrix-Q4_0.gguf"
    assert wanted_files(names, "M.Q8_0.gguf") == ["M.Q8_0.gguf", "M.mmproj-f16.gguf"]
    assert wanted_files(names, "N.Q8_0.gguf") == ["N.Q8_0.gguf"]


@pytest.mark.parametrize("choice", ["Q5_K_M", "4_K_S", ""])
def test_a_choice_that_names_none_lists_them(choice: str) -> None:
    with pytest.raises(CheckpointError, match=r"here has no GGUF file .*; it has m-F16-00001-of-00002\.gguf, m-Q4"):
        choose_gguf(NAMES, choice, "here")


def hub_of(monkeypatch: pytest.MonkeyPatch, snapshot: Path, names: list[str]) -> list[list[str]]:
    """Pretend a hub with one repository; returns what is downloaded of it."""
    import huggingface_hub

    downloads: list[list[str]] = []

    def download(
        repository: str,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        assert repository == "some/repo"
        assert allow_patterns is not None
        downloads.append(allow_patterns)
        for name in allow_patterns:
            if name in names:
                (snapshot / name).parent.mkdir(exist_ok=True)
                write(snapshot / name)
        return str(snapshot)

    monkeypatch.setattr(checkpoint, "hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    siblings = [SimpleNamespace(rfilename=name) for name in [*names, "README.md"]]
    info = SimpleNamespace(siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repository, revision, timeout: info)
    checkpoint._download_once.cache_clear()
    return downloads


def test_of_a_hub_repository_only_the_chosen_file_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = hub_of(monkeypatch, tmp_path, NAMES)
    assert resolve_path("some/repo:Q4_K_M") == tmp_path / "m-Q4_K_M.gguf"
    assert downloads == [["m-Q4_K_M.gguf"]]
    assert resolve_path("some/repo:F16") == tmp_path / "m-F16-00001-of-00002.gguf"
    assert downloads[1] == NAMES[2:4]


def test_a_hub_repository_with_several_files_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = hub_of(monkeypatch, tmp_path, NAMES)
    with pytest.raises(CheckpointError, match=r"repository some/repo has 4 GGUF models; .* REPOSITORY:FILE: m-F16"):
        resolve_path("some/repo")
    assert not any(name in NAMES for patterns in downloads for name in patterns)


def test_a_hub_repository_with_one_file_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_of(monkeypatch, tmp_path, NAMES[:1])
    assert resolve_path("some/repo") == tmp_path / NAMES[0]


def test_without_the_hub_what_was_downloaded_before_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(self: object, repository: str, revision: str | None, timeout: float) -> None:
        raise ConnectionError("no network")

    hub_of(monkeypatch, tmp_path, NAMES)
    resolve_path("some/repo:Q4_K_M")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(checkpoint, "cached_folder", lambda repository, revision: tmp_path)
    checkpoint._download_once.cache_clear()
    assert resolve_path("some/repo:Q4_K_M") == resolve_path("some/repo") == tmp_path / "m-Q4_K_M.gguf"
    with pytest.raises(CheckpointError, match=r"has no GGUF file Q4_K_S; it has m-Q4_K_M\.gguf"):
        resolve_path("some/repo:Q4_K_S")


def test_a_real_cache_is_used_at_once_without_network_and_one_line_says_so(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--repo"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123456789")
    file = repository / "snapshots" / "0123456789" / "m-Q4_K_M.gguf"
    file.parent.mkdir(parents=True)
    write(file)
    code = (
        "from penstock.checkpoint.checkpoint import resolve_path; "
        "print(*[resolve_path('some/repo:Q4_K_M') for _ in range(3)])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == [str(file)] * 3, run.stderr
    assert run.stderr.splitlines() == [f"offline: using the cached file {file}"]
    assert time.monotonic() - began < 15


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.booleans(), st.integers(), st.floats(), st.text())))
def test_a_value_is_of_its_type_or_an_error(values: dict[str, bool | int | float | str]) -> None:
    metadata = Metadata(Path("x.gguf"), values)
    for key, value in values.items():
        for kind in (bool, int, float, str):
            if type(value) is kind and value == value and value not in (float("inf"), float("-inf")):
                assert metadata.find(key, kind) == value
            else:
                with pytest.raises(CheckpointError, match=r"in x\.gguf must be"):
                    metadata.find(key, kind)
