"""Every family that takes sounds against `transformers`: logits of prompts with two sounds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import CheckpointError
from penstock.kernels.ops import Ops
from penstock.kernels.reference_ops import reference_ops
from penstock.models.registry import read_facts, read_spec
from penstock.runner.forward import RecordedForward
from tests.kernels.versions import needs_native, recording_table
from tests.support.hearing import a_sound
from tests.support.sounds import FAMILIES, Heard, images_of, make
from tests.support.stepping import settings_for
from tests.support.vision import Looker

KERNELS = [
    pytest.param(reference_ops, id="reference"),
    pytest.param(recording_table, id="native", marks=needs_native),
]


@pytest.fixture(scope="module", params=FAMILIES)
def heard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Heard, torch.Tensor]:
    made = make(request.param, tmp_path_factory.mktemp("heard"))
    return made, made.logits()


def listened(heard: Heard, ops: Ops, ends: list[int], layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, Looker]:
    """The logits of all tokens, computed in chunks up to `ends`, with the encoder's layers in parts."""
    looker, parts, first = Looker(heard, ops), [], 0
    for image in heard.images:
        assert not any(result.broken_images for result in looker.encode(image, layers))
    for last in [*ends, len(heard.tokens)]:
        parts.append(looker.step(heard.tokens[first:last]))
        first = last
    return torch.cat(parts), looker


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_equal_those_of_transformers_whole_in_chunks_and_decoding(
    heard: tuple[Heard, torch.Tensor], kernels: Any
) -> None:
    """Chunks begin and end inside sounds; the last tokens come alone."""
    made, expected = heard
    whole, looker = listened(made, kernels(), [])
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=0)
    count = len(made.tokens)
    cut, _ = listened(made, kernels(), [7, 9, 20, count - 3, count - 2, count - 1], layers=(1,))
    torch.testing.assert_close(cut, expected, atol=2e-4, rtol=0)
    if kernels is recording_table:
        assert isinstance(looker.runner._forward, RecordedForward)
        assert torch.equal(cut, whole)


def test_a_long_sound_is_cut_where_the_windows_of_the_encoder_end(tmp_path: Path) -> None:
    made = make("Qwen2.5-Omni", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"chunk_length": 60}')
    sound = a_sound(31.0)
    extractor = transformers.WhisperFeatureExtractor(feature_size=made.images[0].height, chunk_length=60)
    given = made.family.inputs(extractor, [sound])
    with torch.no_grad():
        expected = made.model.get_audio_features(**given).last_hidden_state
    looker = Looker(made, reference_ops())
    images = images_of(sound, tmp_path, 0)
    assert [image.width for image in images] == [3000, 100]
    for image in images:
        looker.encode(image)
    found = torch.cat([looker.features(image)[0] for image in images])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_a_whole_omni_model_is_its_thinker(tmp_path: Path) -> None:
    """Its settings are nested, and its tensors' names begin with `thinker`."""
    made = make("Qwen2.5-Omni", tmp_path)
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"talker.codec_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    config = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "talker_config": {}}
    config["thinker_config"] = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _ = listened(made, reference_ops(), [])
    torch.testing.assert_close(found, made.logits(), atol=2e-4, rtol=0)


def test_an_encoder_with_an_unknown_setting_is_skipped_and_the_text_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("Voxtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["audio_config"]["activation_function"] = "relu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint, settings = settings_for(tmp_path)
    assert read_spec(checkpoint).audio_encoder is None
    assert not settings.towers


@pytest.mark.parametrize("name", ["Voxtral", "Qwen3-Omni"])
def test_whatever_the_config_of_an_encoder_says_the_text_is_served_or_the_model_refused(
    name: str, tmp_path: Path
) -> None:
    """Each setting in turn is nonsense; sizes are planned without allocating."""
    family = FAMILIES[name]
    config = getattr(transformers, family.architecture).config_class(**family.config)
    config.architectures = [family.architecture]
    plain = json.loads(json.dumps(config.to_dict(), default=str))
    for key in plain["audio_config"]:
        for nonsense in (0, 3, 2**23, "x"):
            changed = plain | {"audio_config": plain["audio_config"] | {key: nonsense}}
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                facts = read_facts(open_checkpoint(str(tmp_path)), with_weights=False)
            except CheckpointError:
                continue
            assert all(tower.max_tokens > 0 for tower in facts.towers.values())
