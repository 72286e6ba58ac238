"""GGUF adapters: the weights and maps of PEFT's files, and refusals by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from gguf import GGUFWriter

from penstock.checkpoint.adapters import folder
from penstock.checkpoint.adapters.adaptable import Adaptable
from penstock.checkpoint.adapters.folder import AdapterFiles, read_adapter
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import AdapterError
from penstock.models.registry import read_spec
from penstock.models.sizes import adaptable
from tests.support.adapters import write_adapter, write_gguf_adapter
from tests.support.checkpoints import write_random
from tests.support.families import SHAPE, TWO
from tests.support.gguf_files import finish

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
CASES: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "experts one by one, embedding, head": (
        "Qwen3Moe",
        "qwen3moe",
        EXPERTS | {"hidden_size": 64},
        ("q_proj", "k_proj", "gate_proj", "down_proj", "gate", "embed_tokens", "lm_head"),
    ),
    "fused maps": ("Phi3", "phi3", {"hidden_size": 64}, ("qkv_proj", "gate_up_proj", "down_proj")),
    "interleaved queries and keys": ("Llama", "llama", {"hidden_size": 64}, ("q_proj", "k_proj", "v_proj")),
}


def weights_of(files: AdapterFiles) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    stored = files.weights()
    return {(one.matrix, one.part): tuple(map(stored.read, one.stored_names)) for one in files.maps}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", CASES)
def test_its_weights_are_those_of_pefts_files(name: str, kind: str, tmp_path: Path) -> None:
    family, architecture, changes, targets = CASES[name]
    base = tmp_path / "base"
    write_random(base, family, **SHAPE | TWO | changes)
    saved = write_adapter(tmp_path / "adapter", base, targets=targets, rank=5)
    model = adaptable(read_spec(open_checkpoint(str(base))), "float32")
    file = write_gguf_adapter(tmp_path / "adapter.gguf", base, saved, architecture, kind)
    peft, gguf = (read_adapter("a", str(path), model) for path in (saved, file))
    wanted, found = weights_of(peft), weights_of(gguf)
    assert found.keys() == wanted.keys()
    for key, pair in wanted.items():
        for mine, theirs in zip(found[key], pair, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=0 if kind == "F32" else 5e-3)
    assert gguf.adapter.num_elements == peft.adapter.num_elements
    assert {one.scale for one in gguf.maps} == {one.scale for one in peft.maps} == {2.0}


QUERY = "model.layers.0.self_attn.q_proj"
MODEL = Adaptable({QUERY: (16, 32)}, rotated={QUERY: 8})


def write(path: Path, change: Callable[[GGUFWriter], None], architecture: str = "llama") -> Path:
    writer = GGUFWriter(None, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    change(writer)
    finish(writer, path)
    return path


def of(name: str, *shape: int, value: float = 1.0) -> Callable[[GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.full(shape, value, np.float32))


def together(*changes: Callable[[GGUFWriter], None]) -> Callable[[GGUFWriter], None]:
    return lambda writer: [change(writer) for change in changes] and None


A, B = of("blk.0.attn_q.weight.lora_a", 4, 32), of("blk.0.attn_q.weight.lora_b", 16, 4)
REFUSED: dict[str, tuple[Callable[[GGUFWriter], None], str]] = {
    "nothing": (lambda writer: None, "it has no weights"),
    "another kind": (lambda writer: writer.kv_data[0].pop("adapter.type") and None, "only lora is supported"),
    "from a token on": (
        lambda writer: writer.add_array("adapter.alora.invocation_tokens", [1]),
        "adapters that begin at a token",
    ),
    "a norm": (together(A, B, of("blk.0.attn_norm.weight", 32)), "attn_norm.weight', which is not a LoRA weight"),
    "no B": (A, "has lora_a of 'blk.0.attn_q', but no lora_b"),
    "a name of control characters": (of("\x1b[2J" * 9999, 4), r"it has '\\x1b\[2J.*characters\), which is not a LoRA"),
    "a scale beyond float32": (
        together(A, B, lambda writer: writer.add_float64("adapter.lora.alpha", 1e300)),
        r"adapter.lora.alpha is 1e\+300, which is too large",
    ),
    "another layer": (
        together(of("blk.7.attn_q.weight.lora_a", 4, 32), of("blk.7.attn_q.weight.lora_b", 16, 4)),
        r"adds to 'blk.7.attn_q' .* does not have, .*\(attn_q\)",
    ),
    "another shape": (together(A, of("blk.0.attn_q.weight.lora_b", 8, 4)), r"the shape \[8, 4\]; the model asks"),
    "a large rank": (
        together(of("blk.0.attn_q.weight.lora_a", 300, 32), of("blk.0.attn_q.weight.lora_b", 16, 300)),
        "has the rank 300",
    ),
    "NaN": (together(A, of("blk.0.attn_q.weight.lora_b", 16, 4, value=np.nan)), "weights that are NaN"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, told = REFUSED[case]
    with pytest.raises(AdapterError, match=told):
        read_adapter("a", str(write(tmp_path / "a.gguf", change)), MODEL)


def test_matrices_that_files_have_in_another_form_are_refused(tmp_path: Path) -> None:
    model = Adaptable({"gpt_neox.layers.0.attention.query_key_value": (16, 32)})
    pair = together(of("blk.0.attn_qkv.weight.lora_a", 4, 32), of("blk.0.attn_qkv.weight.lora_b", 16, 4))
    with pytest.raises(AdapterError, match="attn_qkv, which GGUF files of gptneox have in another form"):
        read_adapter("a", str(write(tmp_path / "a.gguf", pair, "gptneox")), model)
    with pytest.raises(AdapterError, match="architecture 'martian', which is not supported"):
        read_adapter("a", str(write(tmp_path / "a.gguf", pair, "martian")), model)


def test_an_adapter_for_a_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    """Its matrices may have the same names and shapes, and its rows another order."""
    file = write(tmp_path / "a.gguf", together(A, B), "qwen2")
    with pytest.raises(AdapterError, match="for the architecture qwen2; the model's is llama"):
        read_adapter("a", str(file), replace(MODEL, architecture="llama"))


def test_a_split_adapter_is_refused(tmp_path: Path) -> None:
    def part(writer: GGUFWriter) -> None:
        writer.add_uint16("split.count", 2)

    write(tmp_path / "a-00002-of-00002.gguf", together(B, part))
    with pytest.raises(AdapterError, match="split into 2 files"):
        read_adapter("a", str(write(tmp_path / "a-00001-of-00002.gguf", together(A, part))), MODEL)


def test_a_scale_of_zero_is_one_as_in_llama_cpp(tmp_path: Path) -> None:
    (one,) = read_adapter("a", str(write(tmp_path / "a.gguf", together(A, B))), MODEL).maps
    assert one.scale == 1.0


@pytest.mark.parametrize(("path", "wanted"), [("some/lora", "a-F16.gguf"), ("some/lora:b-F16.gguf", "b-F16.gguf")])
def test_one_of_a_hub_repository_is_downloaded(
    path: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["README.md", "a-F16.gguf"] if ":" not in path else ["a-F16.gguf", "b-F16.gguf"]
    for name in names:
        write(tmp_path / name, together(A, B))
    asked: list[list[str]] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        assert repository == "some/lora"
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(folder, "hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repository: names)
    read = read_adapter("a", path, MODEL)
    assert Path(read.adapter.path).name == wanted
    assert asked[-1] == [wanted]


@pytest.mark.parametrize("path", ["some/lora", "some/lora:F16"])
def test_one_of_the_hubs_cache_is_found_in_its_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gguf").mkdir()
    file = write(tmp_path / "gguf" / "a-F16.gguf", together(A, B))
    monkeypatch.setattr(folder, "hub_answers", lambda: False)
    monkeypatch.setattr(folder, "cached_folder", lambda repository, revision: tmp_path)
    assert read_adapter("a", path, MODEL).adapter.path == str(file)


def test_a_folder_has_one_of_them(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", together(A, B))
    assert read_adapter("a", str(tmp_path), MODEL).maps
    write(tmp_path / "b.gguf", together(A, B))
    with pytest.raises(AdapterError, match="has 2 GGUF files: give one of them"):
        read_adapter("a", str(tmp_path), MODEL)
