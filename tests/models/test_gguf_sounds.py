"""Models that hear from GGUF files and their mmproj files: the answers of their folders, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf.file import open_gguf
from penstock.checkpoint.image_input import read_image_input
from penstock.checkpoint.sound_input import read_sound_input
from penstock.errors import CheckpointError
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import reference_ops
from penstock.models.registry import read_facts, read_spec
from tests.kernels.versions import needs_native, recording_table
from tests.support import omni, sounds
from tests.support.gguf_sounds import write_with_sounds
from tests.support.vision import Looker

KERNELS = [
    pytest.param(reference_ops, id="reference"),
    pytest.param(recording_table, id="native", marks=needs_native),
]
WINDOWS = {"Qwen2.5-Omni": {"n_window": 100}, "Qwen3-Omni": {"n_window": 50, "n_window_infer": 800}}
"""Settings of encoders that files do not have, as the families' checkpoints have them."""
Made = sounds.Heard | omni.Omni


def make(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A random checkpoint of a family with its settings that files do not have."""
    if name not in WINDOWS:
        return sounds.make(name, folder)
    family = sounds.FAMILIES[name]
    config = {**family.config, "audio_config": family.config["audio_config"] | WINDOWS[name]}
    monkeypatch.setitem(sounds.FAMILIES, name, replace(family, config=config))
    return omni.make(name, folder)


def computed(made: Made, ops: Ops) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of all tokens, and the features of all media."""
    looker = Looker(made, ops)
    for image in made.images:
        looker.encode(image)
    return looker.step(made.tokens), [looker.features(image)[0] for image in made.images]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", sounds.FAMILIES)
def test_a_gguf_file_with_its_mmproj_file_beside_it_answers_as_the_folder_does(
    name: str, kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(name, tmp_path / "folder", monkeypatch)
    (tmp_path / "model").mkdir()
    model = tmp_path / "model" / "text-F32.gguf"
    write_with_sounds(made.folder, model)
    logits, features = computed(replace(made, folder=model), kernels())
    expected, heard = computed(made, kernels())
    assert all(map(torch.equal, features, heard))
    assert torch.equal(logits, expected)
