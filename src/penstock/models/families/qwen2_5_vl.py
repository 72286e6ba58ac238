"""Qwen2-VL and Qwen2.5-VL: Qwen2 with a vision tower and positions on three axes.

x += attention(norm(x)); x += mlp(norm(x))      Qwen2's; angles by time, row and column, each a run of frequencies
"""

from collections.abc import Callable
from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.qwen2 import qwen2_spec
from penstock.models.families.towers.qwen_vision import qwen2_5_vision_tower, qwen2_vision_tower
from penstock.models.families.towers.reading import read_tower, with_axes
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec, TowerSpec

_TOWERS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_OLDER = ("vision_token_id",)


def qwen2_vl_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen2VLForConditionalGeneration`."""
    return _qwen2_vl(config, qwen2_vision_tower)


def qwen2_5_vl_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen2_5_VLForConditionalGeneration`."""
    return _qwen2_vl(config, qwen2_5_vision_tower)


def _qwen2_vl(config: HFConfig, read: Callable[[HFConfig, int], TowerSpec]) -> ModelSpec:
    text = config.text(*_TOWERS, *_OLDER)
    text.ignore(*_TOWERS, *_OLDER)  # of older files, where the text model's settings are not apart
    model = replace(qwen2_spec(text), names=multimodal_names("visual"))
    tower = read_tower(config, lambda vision: read(vision, model.hidden_size))
    if tower is None:
        return model
    return replace(with_axes(model, text, [16, 24, 24], interleaved=False), tower=tower)
