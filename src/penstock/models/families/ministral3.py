"""Ministral 3, and Mistral Small 3 and 4 with vision: Mistral with a query scale by position.

x += attention(norm(x))      Llama's with q *= 1 + beta * log(1 + floor(position / original context))
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import NormSpec
from penstock.models.families.dense import check_rotation, read_dense
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.mistral import mistral_spec
from penstock.models.families.mistral4 import mistral4_spec
from penstock.models.families.towers.pixtral import pixtral_tower
from penstock.models.families.towers.reading import read_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import MergeSpec, ModelSpec, ProjectionSpec, TowerSpec

_USUAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
}
"""The default for configs without RoPE settings."""
_TOWERS = (
    *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "multimodal_projector_bias"),
    *("spatial_merge_size", "vision_feature_layer"),
)


def ministral3_spec(config: HFConfig) -> ModelSpec:
    """Read a `Ministral3ForCausalLM`."""
    dense = read_dense(
        config,
        max_position=262144,
        head_dim=128,
        num_kv_heads=8,
        vocab_size=131072,
        norm_eps=1e-5,
        reads_rope=False,
    )
    max_position = dense.model.max_position
    rope, temperature = _positions(config, dense.attention.head_dim, max_position)
    attention = replace(dense.attention, window=config.find_size("sliding_window"), rope=rope, temperature=temperature)
    layers = tuple(dense.layer(index, attention) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers, max_position=rope.context(max_position))


def _positions(config: HFConfig, head_dim: int, max_position: int) -> tuple[RopeConfig, TemperatureConfig]:
    common = {"rope_theta": config.positive("rope_theta", 1e4), "llama_4_scaling_beta": 0.1}
    given = common | (config.rope_settings(common) or _USUAL)
    beta = config.section(given).positive("llama_4_scaling_beta", 0.1, or_zero=True)
    every = config.section(given).size("original_max_position_embeddings", max_position)
    others = {"llama_4_scaling_beta", "max_position_embeddings"}  # the second repeats the config's own key
    rope = config.rope_of({key: given[key] for key in given.keys() - others}, head_dim, max_position)
    check_rotation(rope, head_dim, config)
    return rope, TemperatureConfig(beta, every)


def mistral3_spec(config: HFConfig) -> ModelSpec:
    """Read a `Mistral3ForConditionalGeneration`."""
    text = config.text(*_TOWERS)
    kind = text.get("model_type", "mistral")
    families = {"mistral": mistral_spec, "ministral3": ministral3_spec, "mistral4": mistral4_spec}
    if kind not in families:
        raise text.unsupported("model_type of text_config", kind, tuple(families))
    model = replace(families[kind](text), names=multimodal_names("vision_tower", "multi_modal_projector"))
    eps = model.final_norm.eps
    return replace(model, tower=read_tower(config, lambda vision: _tower(vision, config, model.hidden_size, eps)))


def _tower(vision: HFConfig, config: HFConfig, text_size: int, eps: float) -> TowerSpec:
    """Pixtral's tower, with a linear map of merged patches."""
    config.expect("vision_feature_layer", -1)
    config.expect("projector_hidden_act", "gelu")
    bias, merge = config.get("multimodal_projector_bias", False), config.size("spatial_merge_size", 2)
    tower = pixtral_tower(vision, "vision_tower", merge)
    name, size = "multi_modal_projector", tower.hidden_size
    connector = (
        NormSpec(f"{name}.norm", size, eps),
        MergeSpec(),
        ProjectionSpec(f"{name}.patch_merger.merging_layer", size * merge**2, size, layout="by_channel"),
        ProjectionSpec(f"{name}.linear_1", size, text_size, bias=bias, activation="gelu"),
        ProjectionSpec(f"{name}.linear_2", text_size, text_size, bias=bias),
    )
    return replace(tower, connector=connector)
