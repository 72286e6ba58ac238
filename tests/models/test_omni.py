"""Models with an image encoder and an audio encoder against `transformers`: image, sound and image in a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import reference_ops
from penstock.models.registry import read_spec
from penstock.runner.forward import RecordedForward
from tests.kernels.versions import needs_native, recording_table
from tests.support.omni import Omni, make
from tests.support.stepping import settings_for
from tests.support.vision import Looker

KERNELS = [
    pytest.param(reference_ops, id="reference"),
    pytest.param(recording_table, id="native", marks=needs_native),
]


@pytest.fixture(scope="module", params=["Qwen2.5-Omni", "Qwen3-Omni"])
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Omni, torch.Tensor]:
    made = make(request.param, tmp_path_factory.mktemp("omni"))
    return made, made.logits()


def computed(made: Omni, ops: Ops, ends: list[int], layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, Looker]:
    """The logits of all tokens, computed in chunks up to `ends`, with the encoders' layers in parts."""
    looker, parts, first = Looker(made, ops), [], 0
    for image in made.images:
        assert not any(result.broken_images for result in looker.encode(image, layers))
    for last in [*ends, len(made.tokens)]:
        parts.append(looker.step(made.tokens[first:last]))
        first = last
    return torch.cat(parts), looker


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_those_of_transformers_whole_in_chunks_and_decoding(
    omni: tuple[Omni, torch.Tensor], kernels: Any
) -> None:
    """Chunks begin and end inside pictures and sounds; the last tokens come alone."""
    made, expected = omni
    whole, looker = computed(made, kernels(), [])
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=0)
    count = len(made.tokens)
    cut, _ = computed(made, kernels(), [7, 9, 30, count - 3, count - 2, count - 1], layers=(1,))
    torch.testing.assert_close(cut, expected, atol=2e-4, rtol=0)
    if kernels is recording_table:
        assert isinstance(looker.runner._forward, RecordedForward)
        assert torch.equal(cut, whole)


def changed(folder: Path, section: str, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[section] |= values
    (folder / "config.json").write_text(json.dumps(config))


def test_a_refused_encoder_leaves_the_other_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("Qwen2.5-Omni", tmp_path)
    changed(tmp_path, "vision_config", hidden_act="relu")
    assert [*settings_for(tmp_path)[1].towers] == ["sound"]
    changed(tmp_path, "vision_config", hidden_act="silu")
    changed(tmp_path, "audio_config", activation_function="relu")
    assert [*settings_for(tmp_path)[1].towers] == ["image"]


def test_without_settings_of_pictures_sounds_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("Qwen3-Omni", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert [*settings_for(tmp_path)[1].towers] == ["sound"]
    assert "this model takes no images: " in caplog.text


def test_an_encoder_whose_sinusoids_have_no_rates_is_refused(tmp_path: Path) -> None:
    """`transformers` divides by zero."""
    make("Qwen2.5-Omni", tmp_path)
    for size in (2, 3):
        changed(tmp_path, "audio_config", d_model=size, encoder_attention_heads=1)
        assert read_spec(open_checkpoint(str(tmp_path))).audio_encoder is None
