"""Ministral 3, and the text models of Mistral Small 3 and 4 with vision: Mistral with a query scale by position.

x += attention(norm(x))      Llama's with q *= 1 + beta * log(1 + floor(position / original context))
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.models.families.dense import check_rotation, read_dense
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.mistral import mistral_spec
from penstock.models.families.mistral4 import mistral4_spec
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

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
    """Read the text model of a `Mistral3ForConditionalGeneration`."""
    text = config.text(*_TOWERS)
    kind = text.get("model_type", "mistral")
    families = {"mistral": mistral_spec, "ministral3": ministral3_spec, "mistral4": mistral4_spec}
    if kind not in families:
        raise text.unsupported("model_type of text_config", kind, tuple(families))
    return replace(families[kind](text), names=multimodal_names("vision_tower", "multi_modal_projector"))
