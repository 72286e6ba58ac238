"""How checkpoints take sounds."""

import json

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.sound_input import read_sound_input, unsupported_encoder
from penstock.errors import CheckpointError


def checkpoint_of(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(str(folder))


def test_the_defaults_are_those_of_the_classes_of_transformers(tmp_path):
    qwen = read_sound_input(checkpoint_of(tmp_path, {"model_type": "qwen2_audio"}))
    assert (qwen.num_mels, qwen.max_frames, qwen.placeholder, qwen.num_tokens(3002)) == (128, 3000, 151646, 750)
    voxtral = read_sound_input(checkpoint_of(tmp_path, {"model_type": "voxtral"}))
    assert (voxtral.placeholder, voxtral.padded(3001), voxtral.num_tokens(3000)) == (24, 6000, 375)
    omni = read_sound_input(checkpoint_of(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": {}}))
    assert (omni.window_frames, omni.max_frames, omni.num_tokens(3000)) == (3000, 30000, 750)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("preprocessor_config.json", {"chunk_length": 40}),
        ("processor_config.json", {"feature_extractor": {"chunk_length": 40}, "image_processor": {}}),
    ],
)
def test_the_longest_sound_is_read_in_both_forms_of_a_processor(tmp_path, file, content):
    (tmp_path / file).write_text(json.dumps(content))
    omni = read_sound_input(checkpoint_of(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": {}}))
    assert omni.max_frames == 4000


def test_an_encoder_that_is_not_supported_has_a_name(tmp_path):
    config = {"model_type": "gemma3n", "audio_config": {"model_type": "gemma3n_audio"}}
    assert unsupported_encoder(checkpoint_of(tmp_path, config)) == "gemma3n_audio"
    assert read_sound_input(checkpoint_of(tmp_path, config)) is None
    for without in (
        {"model_type": "gemma3n"},
        {"model_type": "gemma4", "audio_config": None},
        {"model_type": "voxtral"},
    ):
        assert unsupported_encoder(checkpoint_of(tmp_path, without)) is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "voxtral", "audio_token_id": "x"},
        {"model_type": "qwen2_audio", "audio_config": {"num_mel_bins": -1}},
        {"model_type": "qwen2_5_omni", "thinker_config": []},
    ],
)
def test_implausible_settings_are_refused(tmp_path, config):
    with pytest.raises(CheckpointError):
        read_sound_input(checkpoint_of(tmp_path, config))
