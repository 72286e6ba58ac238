"""LFM2-VL: LFM2, or its mixture of experts, with a SigLIP 2 tower for pictures of any shape; large ones are cut.

x += conv or attention; x += mlp(norm(x))       LFM2's
features = W2 gelu(W1 norm([2 x 2 patches]))    in place of the embeddings of image tokens
"""

from dataclasses import replace

from penstock.layers.spec import NormSpec
from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.lfm2 import lfm2_spec
from penstock.models.families.lfm2_moe import lfm2_moe_spec
from penstock.models.families.towers.reading import read_tower
from penstock.models.families.towers.siglip import siglip2_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ConnectorPart, MergeSpec, ModelSpec, ProjectionSpec, TowerSpec

_TOWERS = (
    *("vision_config", "image_token_id", "projector_hidden_act", "projector_hidden_size", "projector_bias"),
    *("projector_use_layernorm", "downsample_factor"),
)
_OF_PROCESSOR = (
    *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance"),
    *("max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail"),
)
"""Settings that files repeat from `preprocessor_config.json`, where they count."""
_TEXTS = {"lfm2": lfm2_spec, "lfm2_moe": lfm2_moe_spec}
_EPS = 1e-5


def lfm2_vl_spec(config: HFConfig) -> ModelSpec:
    """Read an `Lfm2VlForConditionalGeneration`."""
    text = config.text(*_TOWERS, *_OF_PROCESSOR)
    kind = text.get("model_type", "lfm2")
    if kind not in _TEXTS:
        raise text.unsupported("model_type of text_config", kind, tuple(_TEXTS))
    model = replace(_TEXTS[kind](text), names=multimodal_names("vision_tower", "multi_modal_projector"))
    return replace(model, tower=read_tower(config, lambda vision: _tower(vision, config, model.hidden_size)))


def _tower(vision: HFConfig, config: HFConfig, text_size: int) -> TowerSpec:
    config.expect("projector_hidden_act", "gelu")
    merge, bias = config.size("downsample_factor", 2), config.get("projector_bias", True)
    tower = siglip2_tower(vision, "vision_tower", merge)
    name, merged = "multi_modal_projector", tower.hidden_size * merge**2
    inner = config.size("projector_hidden_size", 2560)
    norms: tuple[ConnectorPart, ...] = ()
    if config.get("projector_use_layernorm", True):
        norms = (NormSpec(f"{name}.layer_norm", merged, _EPS, bias=True, centred=True),)
    connector = (
        MergeSpec(),
        *norms,
        ProjectionSpec(f"{name}.linear_1", merged, inner, bias=bias, activation="gelu"),
        ProjectionSpec(f"{name}.linear_2", inner, text_size, bias=bias),
    )
    return replace(tower, connector=connector)
