"""Qwen3-VL: Qwen3, dense or a mixture of experts, with a vision tower and positions on three axes.

x += attention(norm(x)); x += mlp(norm(x))      Qwen3's; rotary angles by time, row and column in turns
x += features of a tap                          after each of the first layers, at the tokens of images (DeepStack)
"""

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.qwen3 import qwen3_spec
from penstock.models.families.qwen3_moe import qwen3_mixture
from penstock.models.families.towers.qwen_vision import QWEN3_VL, MergerNames, qwen3_vision_tower
from penstock.models.families.towers.reading import read_tower, with_axes
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec, TowerSpec

_TOWERS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def qwen3_vl_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3VLForConditionalGeneration`."""
    return _qwen3_vl(config, qwen3_spec)


def qwen3_vl_moe_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3VLMoeForConditionalGeneration`."""
    return _qwen3_vl(config, _mixture)


def _mixture(text: HFConfig) -> ModelSpec:
    text.expect("norm_topk_prob", True)
    return qwen3_mixture(text, renormalize=True)


def _qwen3_vl(config: HFConfig, text_spec: Callable[[HFConfig], ModelSpec]) -> ModelSpec:
    text = config.text(*_TOWERS)
    return with_vision(replace(text_spec(text), names=multimodal_names("visual")), config, text)


def with_vision(model: ModelSpec, config: HFConfig, text: HFConfig, names: MergerNames = QWEN3_VL) -> ModelSpec:
    """A text model with the vision tower of `vision_config`, and positions on three axes if there is one."""

    def read(vision: HFConfig) -> TowerSpec:
        vision.expect("apply_vit_abs_pos_embed", True)
        vision.ignore("image_size", "tokens_per_second")  # of videos
        tower = qwen3_vision_tower(vision, model.hidden_size, taps=(8, 16, 24), names=names)
        if len(tower.taps) >= model.num_layers:
            raise CheckpointError(f"{len(tower.taps)} taps need as many text layers and one more")
        return tower

    tower = read_tower(config, read)
    return model if tower is None else replace(with_axes(model, text, [24, 20, 20]), tower=tower)
