"""An output projection that differs from the embedding is used, though the config ties them, as in `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.models.loading import stored_head
from penstock.models.registry import read_spec
from tests.support.checkpoints import write_random
from tests.support.families import MULTIMODAL, SHAPE
from tests.support.reference import expected, texts
from tests.support.stepping import Stepper

TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SHAPE | {"tie_word_embeddings": True}),
    "gemma 3, with a tower": MULTIMODAL["gemma3"],
}


def store_head(folder: Path, change: float, *, split: bool = False) -> None:
    """Store an output projection that differs by `change` from the embedding, in a file of its own if `split`."""
    file, head_file = folder / "model.safetensors", folder / "head.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items() if "lm_head" not in name}
    (embedding,) = (tensor for name, tensor in tensors.items() if "embed_tokens.weight" in name)
    head = embedding.clone()
    head[-1] += change
    if not split:
        save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
        return
    save_file({"lm_head.weight": head}, head_file, {"format": "pt"})
    save_file(tensors, folder / "rest.safetensors", {"format": "pt"})
    places = {**dict.fromkeys(tensors, "rest.safetensors"), "lm_head.weight": head_file.name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    file.unlink()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", TIED)
def test_a_stored_head_that_differs_is_used(
    tmp_path: Path, name: str, split: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_head, "_PIECE", 1000)
    family, config = TIED[name]
    model = write_random(tmp_path, family, **config)
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"tie_word_embeddings": True}))
    store_head(tmp_path, 0.5, split=split)
    reference = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    (text,) = texts((30,))
    logits = Stepper(tmp_path, 1, kv_cache_memory="16MiB").step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)
    assert "lm_head.weight differs from model.embed_tokens.weight and is used" in caplog.text


@pytest.mark.parametrize("split", [False, True])
def test_a_stored_copy_of_the_embedding_stays_tied(tmp_path: Path, split: bool) -> None:
    write_random(tmp_path, "Llama", **TIED["llama"][1])
    assert read_spec(open_checkpoint(str(tmp_path))).tie_embeddings
    store_head(tmp_path, 0.0, split=split)
    assert read_spec(open_checkpoint(str(tmp_path))).tie_embeddings


@pytest.mark.parametrize("content", [b"", b"\x04\0\0\0\0\0\0\0[[[[", b"\x02\0\0\0\0\0\0\0{}", 9 * b"\xff"])
def test_damaged_files_are_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    write_random(tmp_path, "Llama", **TIED["llama"][1])
    (tmp_path / "model.safetensors").write_bytes(content)
    assert not stored_head.has_own_head(tmp_path, read_spec(open_checkpoint(str(tmp_path))).names)
