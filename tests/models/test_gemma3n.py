"""Gemma 3n from a folder with its towers (`Gemma3nForConditionalGeneration`): only the text model is computed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_random
from tests.support.families import CASES, SHAPE
from tests.support.reference import expected, referee, texts
from tests.support.stepping import Stepper


def test_the_text_model_of_a_folder_with_towers_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family, changes = CASES["gemma3n"]
    reference = referee(write_random(tmp_path, family, **(SHAPE | changes)))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tensors |= {
        f"model.{tower}.x.weight": torch.ones(2, 2) for tower in ("vision_tower", "audio_tower", "embed_vision")
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
        "vision_config": {"hidden_size": 2},
        "audio_config": {"hidden_size": 2},
        "image_token_id": 158,
        "vision_soft_tokens_per_image": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tokens,) = texts((40,))
    logits = Stepper(tmp_path, 1, kv_cache_memory="16MiB").step({0: tokens})[0]
    torch.testing.assert_close(logits, expected(reference, tokens), atol=2e-4, rtol=0)
    assert "settings are unknown" not in caplog.text
