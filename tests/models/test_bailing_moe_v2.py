"""Ling 2 (`BailingMoeV2ForCausalLM`) against GLM 4.5 in `transformers`, which computes the same under other names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from tests.support import gguf_families
from tests.support.checkpoints import write_random
from tests.support.families import CASES, SHAPE
from tests.support.gguf_tensors import correction_biases
from tests.support.reference import cut, expected, referee, texts
from tests.support.stepping import Stepper

NAMES = {
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    "e_score_correction_bias": "expert_bias",
    "embed_tokens": "word_embeddings",
}
KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("ling")
    family, changes = CASES["glm4 moe"]
    reference = referee(write_random(folder, family, **(SHAPE | changes)))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        parts = [tensors.pop(f"{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"{layer}.attention.query_key_value.weight"] = torch.cat(parts)
    for old, new in NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    config = {KEYS.get(key, key): value for key, value in config.items()}
    config |= {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder, reference


def test_a_prompt_in_pieces_has_the_logits_of_glm(written: tuple[Path, Any]) -> None:
    folder, reference = written
    (text,) = texts((70,))
    stepper = Stepper(folder, 1, kv_cache_memory="16MiB")
    logits = torch.cat([stepper.step({0: piece})[0] for piece in cut(text, [33, 1])])
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)


def _add_keys(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(config["head_dim"] // 2)
    writer.add_uint32("bailingmoe2.expert_gating_func", 2)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_shared_count(config["num_shared_experts"])


def test_a_gguf_file_has_the_same(
    written: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, reference = written
    row = ("bailingmoe2", _add_keys, correction_biases)
    monkeypatch.setitem(gguf_families.FAMILIES, "BailingMoeV2ForCausalLM", row)  # type: ignore[arg-type]
    gguf_families.write_family(tmp_path / "model.gguf", folder)
    (text,) = texts((40,))
    logits = Stepper(tmp_path / "model.gguf", 1, kv_cache_memory="16MiB").step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)
    assert "settings are unknown" not in caplog.text
