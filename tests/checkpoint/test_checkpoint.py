import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.checkpoint import checkpoint
from penstock.checkpoint.checkpoint import DEMO_FOLDER, open_checkpoint, resolve_path
from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.errors import CheckpointError, ConfigError
from tests.support.checkpoints import write_tiny_llama
from tests.support.gguf_files import write_gguf
from tests.support.hub import hub


def write_model(folder: Path, config: object, generation: object = None) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def test_no_model_means_the_demo_model() -> None:
    assert resolve_path(None) == DEMO_FOLDER


def test_a_folder_gives_its_config_and_its_own_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, {"model_type": "llama", "eos_token_id": 7}))
    assert checkpoint.path == tmp_path
    assert checkpoint.name == tmp_path.name
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation == GenerationDefaults(eos_token_ids=(7,))


def test_generation_config_decides_before_config(tmp_path: Path) -> None:
    numbers = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
    }
    checkpoint = open_checkpoint(write_model(tmp_path, {"eos_token_id": 7}, {"eos_token_id": [1, 2], **numbers}))
    assert checkpoint.generation == GenerationDefaults(eos_token_ids=(1, 2), **numbers)


def test_end_tokens_of_a_multimodal_model_are_those_of_its_text_config_unless_others_are_named(tmp_path: Path) -> None:
    nested = {"text_config": {"eos_token_id": [7, 8]}}
    for config, generation, ends in (
        (nested, None, (7, 8)),
        (nested | {"eos_token_id": None}, {"temperature": 0.5}, (7, 8)),
        (nested | {"eos_token_id": 3}, None, (3,)),
        (nested, {"eos_token_id": 5}, (5,)),
    ):
        assert open_checkpoint(write_model(tmp_path, config, generation)).generation.eos_token_ids == ends
    with pytest.raises(CheckpointError, match=r"eos_token_id in .*config\.json"):
        open_checkpoint(write_model(tmp_path, {"text_config": {"eos_token_id": "</s>"}}, {}))


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, {}, {"do_sample": False, "temperature": 0.6}))
    assert checkpoint.generation.temperature == 0.0
    assert checkpoint.generation.eos_token_ids == ()


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": 10**30}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
        ({"top_p": "x"}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 10**400}, "top_k"),
        ({"top_k": 2.5}, "top_k .* whole"),
        ({"do_sample": "no"}, "do_sample"),
    ],
)
def test_a_generation_default_of_the_wrong_type_is_named(tmp_path: Path, generation: object, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(write_model(tmp_path, {}, generation))


@pytest.mark.parametrize("folder", ["{tmp}/nowhere", "./nowhere", "~nobody/nowhere", "a/b/nowhere"])
def test_a_missing_folder_is_named(tmp_path: Path, folder: str) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere"):
        open_checkpoint(folder.format(tmp=tmp_path))


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="not a GGUF file; give one, or the folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_a_folder_without_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_damaged_json_file_is_named(tmp_path: Path, file: str, text: str) -> None:
    write_model(tmp_path, {})
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=file):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("given", ["current", "current/", "./v12/../current"])
def test_a_link_to_a_folder_is_called_by_its_own_name(
    given: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "v12")
    (tmp_path / "current").symlink_to("v12")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint(given)
    assert (checkpoint.name, checkpoint.path) == ("current", (tmp_path / "v12").resolve())
    monkeypatch.chdir(tmp_path / "v12")
    assert open_checkpoint(".").name == "v12"


def test_a_hub_id_that_cannot_be_downloaded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match="nobody/nothing is not a local folder or file, and could not be downloaded"
    ):
        open_checkpoint("nobody/nothing")


def test_weights_of_a_hub_repository_are_downloaded_in_one_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils._paths import filter_repo_objects

    asked: dict[str, list[str]] = {}

    def download(repository: str, revision: str | None, **patterns: list[str]) -> str:
        asked.update(patterns)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_path("some/model")
    needed = ["config.json", "chat_template.jinja", "model-00001-of-00002.safetensors", "2_Dense/model.safetensors"]
    copies = ["original/model.safetensors", "consolidated-00001-of-00010.safetensors", "model.fp16.safetensors"]
    allowed, ignored = asked["allow_patterns"], asked["ignore_patterns"]
    found = filter_repo_objects([*needed, *copies, "model.bin"], allow_patterns=allowed, ignore_patterns=ignored)
    assert list(found) == needed


def test_it_imports_neither_torch_nor_the_hub() -> None:
    code = "import sys, penstock.checkpoint.checkpoint; assert not {'torch', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_overrides_replace_settings_and_merge_nested_configs_as_vllm_does(tmp_path: Path) -> None:
    """By `ModelConfig._apply_dict_overrides` of vLLM: within a nested config objects are merged, elsewhere replaced."""
    config = {
        "rope_theta": 5.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
        "text_config": {"hidden_size": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    }
    overrides = {
        "rope_scaling": {"rope_type": "yarn"},
        "quantization_config": {"bits": 8},
        "text_config": {"rope_parameters": {"rope_type": "yarn"}, "new": {"a": 1}},
        "sliding_window": None,
    }
    folder = write_model(tmp_path, config)
    assert open_checkpoint(folder, hf_overrides=json.dumps(overrides)).config == {
        "rope_theta": 5.0,
        "rope_scaling": {"rope_type": "yarn"},
        "quantization_config": {"bits": 8},
        "text_config": {
            "hidden_size": 8,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0},
            "new": {"a": 1},
        },
        "sliding_window": None,
    }
    assert open_checkpoint(folder).config == config


def test_end_tokens_may_be_overridden(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"eos_token_id": 7})
    assert open_checkpoint(folder, hf_overrides='{"eos_token_id": [3, 4]}').generation.eos_token_ids == (3, 4)


@pytest.mark.parametrize("model", [None, "{tmp}"])
def test_a_revision_of_what_is_on_this_machine_is_refused(tmp_path: Path, model: str | None) -> None:
    given = None if model is None else write_model(tmp_path, {})
    with pytest.raises(ConfigError, match=r"revision is for models of the Hugging Face hub, and .*: leave it out"):
        resolve_path(given, "main")


@pytest.mark.parametrize("revision", ["../main", "", "a b", "a/../../b", "-x"])
def test_a_revision_that_can_be_none_is_refused(revision: str) -> None:
    with pytest.raises(ConfigError, match="revision must be a branch, tag or commit of some/repo"):
        resolve_path("some/repo", revision)


OLD, NEW = "0" * 40, "1" * 40
RESOLVE = """
import sys
from penstock.checkpoint.checkpoint import open_checkpoint
for revision in sys.argv[2:]:
    print(open_checkpoint(sys.argv[1], revision=revision or None).path)
"""


def resolved(model: str, *revisions: str, cache: Path, endpoint: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", RESOLVE, model, *revisions]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_without_network_a_revision_is_found_in_the_cache_by_branch_tag_or_commit(
    tmp_path: Path, is_gguf: bool
) -> None:
    cached = tmp_path / "models--some--repo"
    (cached / "refs").mkdir(parents=True)
    for name, commit in (("main", NEW), ("v1", OLD)):
        (cached / "refs" / name).write_text(commit)
        folder = cached / "snapshots" / commit
        if is_gguf:
            folder.mkdir(parents=True)
            write_gguf(folder / "m-F32.gguf", write_tiny_llama(tmp_path / "tiny"))
        else:
            write_tiny_llama(folder)
    run = resolved("some/repo", "", "v1", OLD, NEW, cache=tmp_path, endpoint="http://127.0.0.1:9")
    paths = [Path(line) for line in run.stdout.splitlines()]
    assert [(path.parent if is_gguf else path).name for path in paths] == [NEW, OLD, OLD, NEW], run.stderr
    run = resolved("some/repo", "v2", cache=tmp_path, endpoint="http://127.0.0.1:9")
    assert "the hub cannot be reached" in run.stderr  # huggingface_hub would try for most of a minute
    assert "some/repo is not a local folder or file, and its revision v2 could not be downloaded" in run.stderr


@pytest.mark.parametrize("is_gguf", [False, True])
def test_the_files_of_a_revision_are_downloaded(tmp_path: Path, is_gguf: bool) -> None:
    for commit in (OLD, NEW):
        folder = tmp_path / "hub" / commit
        if is_gguf:
            folder.mkdir(parents=True)
            write_gguf(folder / f"m-{commit[0]}.gguf", write_tiny_llama(tmp_path / "tiny"))
        else:
            write_tiny_llama(folder, rope_theta=float(commit[0]) + 5)
    with hub(tmp_path / "hub", {"main": NEW, "v1": OLD}) as endpoint:
        run = resolved("some/repo", "v1", "", OLD, cache=tmp_path / "cache", endpoint=endpoint)
    paths = [Path(line) for line in run.stdout.splitlines()]
    assert len(paths) == 3, run.stderr
    if is_gguf:
        assert [path.name for path in paths] == ["m-0.gguf", "m-1.gguf", "m-0.gguf"]
    else:
        assert [json.loads((path / "config.json").read_text())["rope_theta"] for path in paths] == [5, 6, 5]
