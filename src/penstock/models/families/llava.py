"""Pixtral 12B in the form of LLaVA: Mistral with Pixtral's vision tower. Of other LLaVAs the text model is served.

x += attention(norm(x)); x += mlp(norm(x))      Mistral's, or Llama's
features = W2 gelu(W1 patch)                    in place of the embeddings of image tokens
"""

from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.llama import llama_spec
from penstock.models.families.mistral import mistral_spec
from penstock.models.families.towers.pixtral import pixtral_tower
from penstock.models.families.towers.reading import read_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec, ProjectionSpec, TowerSpec

_TOWERS = (
    *("vision_config", "image_token_index", "image_token_id", "image_seq_length", "projector_hidden_act"),
    *("multimodal_projector_bias", "vision_feature_layer", "vision_feature_select_strategy"),
)


def llava_spec(config: HFConfig) -> ModelSpec:
    """Read a `LlavaForConditionalGeneration`."""
    text = config.text(*_TOWERS)
    kind = text.get("model_type", "llama")
    families = {"mistral": mistral_spec, "llama": llama_spec}
    if kind not in families:
        raise text.unsupported("model_type of text_config", kind, tuple(families))
    model = replace(families[kind](text), names=multimodal_names("vision_tower", "multi_modal_projector"))
    return replace(model, tower=read_tower(config, lambda vision: _tower(vision, config, model.hidden_size)))


def _tower(vision: HFConfig, config: HFConfig, text_size: int) -> TowerSpec:
    vision.expect("model_type", "pixtral")
    if config.get("vision_feature_layer", -2) != -1:
        raise config.unsupported("vision_feature_layer", config.get("vision_feature_layer", -2), (-1,))
    if config.get("vision_feature_select_strategy", "default") != "full":
        raise config.unsupported("vision_feature_select_strategy", "default", ("full",))
    config.expect("projector_hidden_act", "gelu")
    bias = config.get("multimodal_projector_bias", True)
    tower = pixtral_tower(vision, "vision_tower", merge=1)
    name = "multi_modal_projector"
    connector = (
        ProjectionSpec(f"{name}.linear_1", tower.hidden_size, text_size, bias=bias, activation="gelu"),
        ProjectionSpec(f"{name}.linear_2", text_size, text_size, bias=bias),
    )
    return replace(tower, connector=connector)
