"""Gemma 3 (text): norms of query and key heads; sliding windows with their own RoPE base in five of six layers.

x = sqrt(hidden_size) * embedding
q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); norms multiply by 1 + weight
x += norm(Wo attend(rope(q), rope(k), v))       five of six layers: over `sliding_window` keys
x += norm(mlp(norm(x)))                         gelu for silu
"""

from dataclasses import replace

from penstock.models.families.gemma2 import gemma_layer, read_gemma
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelNames, ModelSpec

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
    text.expect("is_causal", True)
    windows = text.layer_windows(
        dense.num_layers, window // 2 + 1 if bidirectional else window, lambda index: (index + 1) % pattern > 0
    )
    attention = replace(dense.attention, qk_norm_eps=dense.norm_eps, bidirectional=bidirectional)
    attentions = (
        replace(attention, window=window, rope=ropes["full_attention" if window is None else "sliding_attention"])
        for window in windows
    )
    return replace(
        dense.model,
        layers=tuple(gemma_layer(dense, index, one) for index, one in enumerate(attentions)),
        names=multimodal_names("vision_tower", "multi_modal_projector"),
    )


def multimodal_names(*towers: str) -> ModelNames:
    """Llama's names with the prefix `language_model` of multimodal checkpoints; the tensors of `towers` are skipped."""
    skipped = "|".join(towers)
    return ModelNames(
        ignored=(*ModelNames().ignored, rf"(model\.)?({skipped})\..*"),
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
    )
