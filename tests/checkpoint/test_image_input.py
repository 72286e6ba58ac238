"""Settings of image processors, and what is wrong with them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.image_input import read_image_input
from penstock.config.engine_config import EngineConfig
from penstock.engine.build import _image_input, _limited
from penstock.errors import CheckpointError
from tests.core.images import make_tower

LLAMA4 = {"model_type": "llama4", "vision_config": {"image_size": 336}}
QWEN = {"model_type": "qwen2_5_vl", "image_token_id": 9}
PROCESSOR = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056}


def checkpoint(folder, config=QWEN, processor=PROCESSOR, name="preprocessor_config.json"):
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / name).write_text(json.dumps(processor))
    return open_checkpoint(str(folder))


def test_settings_are_read_from_either_file(tmp_path):
    (tmp_path / "a").mkdir()
    older = read_image_input(checkpoint(tmp_path / "a"))
    newer = {"image_processor": {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}}
    assert read_image_input(checkpoint(tmp_path, processor=newer, name="processor_config.json")) == older
    assert (older.placeholder, older.max_pixels) == (9, 12_845_056)


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        (QWEN, None, "neither a preprocessor_config.json"),
        ({"model_type": "qwen2_vl"}, PROCESSOR, "has no image_token_id"),
        (QWEN, {"patch_size": 0}, "patch_size must be above 0"),
        (QWEN, {"max_pixels": 10**12}, "max_pixels must be a number from 0"),
        (QWEN, {"patch_size": "x"}, "patch_size must be a number from 0"),
        (QWEN, {"image_mean": [0.5]}, "image_mean must be three numbers"),
        (QWEN, {"resample": 0}, "resample 0 is not supported"),
        ({"model_type": "llava", "image_token_index": 9}, {}, "this vision tower"),
        ({"model_type": "internvl", "image_token_id": 9}, {"size": {"height": 224}}, "must be image_size"),
        ({"model_type": "internvl", "downsample_ratio": 0}, {}, "downsample_ratio must be a number above 0"),
        (LLAMA4, {"max_patches": 10**6}, "max_patches must be at most"),
        ({"model_type": "llama4"}, {"resize_to_max_canvas": True}, "resize_to_max_canvas true is not supported"),
        ({"model_type": "lfm2_vl"}, {"use_thumbnail": False}, "use_thumbnail false is not supported"),
        ({"model_type": "lfm2_vl", "use_image_special_tokens": False}, {}, "use_image_special_tokens false"),
        ({"model_type": "lfm2_vl"}, {"min_tiles": 1}, "min_tiles must be at least 2"),
        ({"model_type": "lfm2_vl"}, {"tile_size": 500}, "a multiple of 32"),
        (
            {"model_type": "gemma3", "boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3},
            {"do_pan_and_scan": True},
            "do_pan_and_scan true is not supported",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(tmp_path, config, processor, words):
    with pytest.raises(CheckpointError, match=words):
        read_image_input(checkpoint(tmp_path, config, processor))


QWEN3 = {"model_type": "qwen3_vl", "image_token_id": 9}
OMNI = {"model_type": "qwen3_omni_moe", "thinker_config": {"vision_config": {"patch_size": 16}}}
GEMMA4 = {"model_type": "gemma4", "image_token_id": 9, "boi_token_id": 7, "eoi_token_id": 8}
LFM2 = {"model_type": "lfm2_vl", "downsample_factor": 2}
MISTRAL3 = {
    "model_type": "mistral3",
    "image_token_id": 9,
    "spatial_merge_size": 2,
    "vision_config": {"model_type": "pixtral", "patch_size": 14},
}


@pytest.mark.parametrize(
    ("config", "key", "given", "tower_key", "value"),
    [
        (QWEN | {"vision_config": {"patch_size": 14}}, "patch_size", 16, "patch_size", 14),
        (QWEN3, "patch_size", 14, "patch_size", 16),
        (QWEN3, "merge_size", 4, "spatial_merge_size", 2),
        (QWEN3, "temporal_patch_size", 1, "temporal_patch_size", 2),
        (OMNI, "patch_size", 14, "patch_size", 16),
        (GEMMA4, "patch_size", 14, "patch_size", 16),
        (GEMMA4, "pooling_kernel_size", 2, "pooling_kernel_size", 3),
        (LFM2, "encoder_patch_size", 14, "patch_size", 16),
        (LFM2, "downsample_factor", 4, "downsample_factor", 2),
    ],
)
def test_a_processor_whose_patches_are_not_the_towers_is_refused(tmp_path, config, key, given, tower_key, value):
    made = checkpoint(tmp_path, config, {key: given})
    with pytest.raises(CheckpointError) as raised:
        read_image_input(made)
    processor, config_file = tmp_path / "preprocessor_config.json", tmp_path / "config.json"
    assert f"{processor}: {key} is {given}, but the vision tower's {tower_key} ({config_file}) is {value}" in str(
        raised.value
    )
    (tmp_path / "preprocessor_config.json").write_text("{}")
    silent = read_image_input(made)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: value}))
    assert read_image_input(made) == silent, "settings that the processor does not state are the tower's"


@pytest.mark.parametrize(
    ("config", "key", "given"),
    [(MISTRAL3, "patch_size", 16), (MISTRAL3, "spatial_merge_size", 1), (LLAMA4, "patch_size", 16)],
)
def test_a_processor_that_counts_other_patches_than_the_towers_is_refused(tmp_path, config, key, given):
    """`PixtralProcessor` and `Llama4Processor` count by settings beside those of the image processor."""
    size = {"size": {"height": 336, "width": 336}} if config is LLAMA4 else {}
    made = checkpoint(tmp_path, config, size | {"patch_size": 4})
    assert read_image_input(made).patch_size == 14, "the image processor's own patch_size is not read by these two"
    (tmp_path / "processor_config.json").write_text(json.dumps({key: given}))
    with pytest.raises(
        CheckpointError, match=f"processor_config.json: {key} is {given}, but the vision tower's {key} "
    ):
        read_image_input(made)


def test_an_unknown_family_takes_text_only(tmp_path):
    assert read_image_input(checkpoint(tmp_path, {"model_type": "llama"}, None)) is None


def test_options_turn_images_off_and_bound_their_tokens(tmp_path):
    opened, facts = checkpoint(tmp_path), SimpleNamespace(towers={"image": None})
    whole = _image_input(EngineConfig(), opened, facts)
    assert whole == replace(read_image_input(opened), max_tokens=4096)
    allowed = _image_input(EngineConfig.from_options(max_image_tokens=16_384), opened, facts)
    assert allowed == replace(whole, max_tokens=16_384)
    tower = replace(make_tower(), max_tokens=16_384, max_patches=65_536)
    assert _limited(tower, allowed) == tower
    assert _limited(tower, whole) == replace(tower, max_tokens=4096, max_patches=16_384), "memory is planned for less"
    bounded = EngineConfig.from_options(max_image_tokens=64)
    assert whole.max_tokens == 4096, "of more the memory plan would be large, and most pictures need fewer"
    assert _image_input(bounded, opened, facts) == replace(whole, max_tokens=64)
    assert _image_input(EngineConfig.from_options(images=False), opened, facts) is None
    assert _image_input(EngineConfig(), opened, SimpleNamespace(towers={})) is None
