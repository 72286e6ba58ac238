"""InternVL 2.5 to 3.5 in the form of `transformers`: Qwen2, Qwen3 or Llama with InternViT, for pictures cut into tiles.

x += attention(norm(x)); x += mlp(norm(x))      the text model's
features = W2 gelu(W1 norm([2 x 2 patches]))    in place of the embeddings of image tokens
"""

from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.llama import llama_spec
from penstock.models.families.qwen2 import qwen2_spec
from penstock.models.families.qwen3 import qwen3_spec
from penstock.models.families.qwen3_moe import qwen3_moe_spec
from penstock.models.families.towers.intern_vit import intern_vit
from penstock.models.families.towers.reading import read_merge, read_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec, TowerSpec

_TOWERS = (
    *("vision_config", "image_token_id", "image_seq_length", "downsample_ratio", "projector_hidden_act"),
    *("vision_feature_layer", "vision_feature_select_strategy"),
)
_TEXTS = {
    "qwen2": qwen2_spec,
    "qwen3": qwen3_spec,
    "qwen3_moe": qwen3_moe_spec,
    "llama": llama_spec,
}


def internvl_spec(config: HFConfig) -> ModelSpec:
    """Read an `InternVLForConditionalGeneration`."""
    text = config.text(*_TOWERS)
    kind = text.get("model_type", "qwen2")
    if kind not in _TEXTS:
        raise text.unsupported("model_type of text_config", kind, tuple(_TEXTS))
    model = replace(_TEXTS[kind](text), names=multimodal_names("vision_tower", "multi_modal_projector"))

    def read(vision: HFConfig) -> TowerSpec:
        config.expect("vision_feature_layer", -1)
        config.expect("vision_feature_select_strategy", "default")
        config.expect("projector_hidden_act", "gelu")
        return intern_vit(vision, model.hidden_size, read_merge(config, "downsample_ratio"))

    return replace(model, tower=read_tower(config, read))
