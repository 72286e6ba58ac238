"""Gemma 3: norms of query and key heads; sliding windows with their own RoPE base in five of six layers.

x = sqrt(hidden_size) * embedding
q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); norms multiply by 1 + weight
x += norm(Wo attend(rope(q), rope(k), v))       five of six layers: over `sliding_window` keys
x += norm(mlp(norm(x)))                         gelu for silu

The tokens of an image attend to each other in both directions; its features are averages of SigLIP's.
"""

from dataclasses import replace

from penstock.layers.spec import NormSpec
from penstock.models.families.gemma2 import gemma_layer, read_gemma
from penstock.models.families.towers.reading import read_tower
from penstock.models.families.towers.siglip import siglip_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import MergeSpec, ModelNames, ModelSpec, ProjectionSpec, TowerSpec

_TOWERS = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def gemma3_spec(config: HFConfig) -> ModelSpec:
    """Read a `Gemma3ForCausalLM`, a `Gemma3TextModel`, or the text model of a `Gemma3ForConditionalGeneration`."""
    text = config.text(*_TOWERS)
    dense = read_gemma(text, max_position=131072, vocab_size=262208, soft_caps=(None, None))
    text.expect("attn_logit_softcapping", None)  # not implemented in `transformers` either
    head_dim, max_position = dense.attention.head_dim, dense.model.max_position
    thetas = {"full_attention": 1e6, "sliding_attention": 1e4}
    ropes = text.ropes_by_kind(head_dim, max_position, thetas, local_theta="rope_local_base_freq")
    pattern = text.size("sliding_window_pattern", 6)
    window, bidirectional = text.size("sliding_window", 4096), text.get("use_bidirectional_attention", False)
    tower = read_tower(config, lambda vision: _tower(vision, config, dense.model.hidden_size))
    text.expect("is_causal", True)
    windows = text.layer_windows(
        dense.num_layers, window // 2 + 1 if bidirectional else window, lambda index: (index + 1) % pattern > 0
    )
    attention = replace(
        dense.attention, qk_norm_eps=dense.norm_eps, bidirectional=bidirectional, joins_images=tower is not None
    )
    attentions = (
        replace(attention, window=window, rope=ropes["full_attention" if window is None else "sliding_attention"])
        for window in windows
    )
    return replace(
        dense.model,
        layers=tuple(gemma_layer(dense, index, attention) for index, attention in enumerate(attentions)),
        names=multimodal_names("vision_tower", "multi_modal_projector"),
        tower=tower,
    )


def _tower(vision: HFConfig, config: HFConfig, text_size: int) -> TowerSpec:
    """SigLIP, whose patches are averaged."""
    vision.expect("model_type", "siglip_vision_model")
    features = config.size("mm_tokens_per_image", 256)
    tower = siglip_tower(vision, "vision_tower", features=features)
    assert tower.side is not None
    if (tower.side // (tower.patch.size * tower.merge)) ** 2 != features:
        raise config.unsupported("mm_tokens_per_image", features, ("a number that squares of patches make",))
    name, size = "multi_modal_projector", tower.hidden_size
    assert tower.last_norm is not None
    connector = (
        MergeSpec(mean=True),
        NormSpec(f"{name}.mm_soft_emb_norm", size, tower.last_norm.eps, offset=1.0),
        ProjectionSpec(f"{name}.mm_input_projection_weight", size, text_size, layout="transposed"),
    )
    return replace(tower, connector=connector)


def multimodal_names(*towers: str) -> ModelNames:
    """Llama's names with the prefix `language_model` of multimodal checkpoints.

    The tensors of `towers`, whose names then begin with the tower's, are skipped, but for those that are loaded.
    """
    skipped = "|".join(towers)
    return ModelNames(
        ignored=(*ModelNames().ignored, rf"(model\.)?({skipped})\..*"),
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
            *((f"model.{tower}.vision_model.", f"{tower}.") for tower in towers),
            *((f"{tower}.vision_model.", f"{tower}.") for tower in towers),
            *((f"model.{tower}.", f"{tower}.") for tower in towers),
        ),
    )
