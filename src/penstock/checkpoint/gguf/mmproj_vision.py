"""Readers of the vision towers in llama.cpp's `mmproj` files: sizes of the tower, and how pictures become numbers.

llama.cpp has the other settings of processors in its code; here they are the defaults of `checkpoint/image_input.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.checkpoint.gguf.mmproj_keys import EncoderSettings, GivenEncoder

MERGER = "mm.patch_merger.weight"
_FEWEST_TOKENS, _MOST_TOKENS = 8, 4096
"""llama.cpp's limits for a picture of Qwen's."""
_EPS = 1e-5
"""Of the norms of Pixtral's and Llama 4's towers."""
_WINDOW = 112
"""Side in pixels of Qwen2.5-VL's windows, in llama.cpp."""


def _qwen_vision(given: GivenEncoder) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the towers of Qwen's models have in common: `vision_config` and the processor's settings."""
    patch, merge = given.size("patch_size"), given.size("spatial_merge_size", 2)
    side = patch * merge
    vision = {
        "depth": given.num_layers(),
        "num_heads": given.size("attention.head_count"),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
    }
    processor = {
        "patch_size": patch,
        "merge_size": merge,
        "min_pixels": given.size("image_min_pixels", _FEWEST_TOKENS * side**2),
        "max_pixels": given.size("image_max_pixels", _MOST_TOKENS * side**2),
    }
    return vision, processor


def _qwen2_vl(given: GivenEncoder) -> EncoderSettings:
    vision, processor = _qwen_vision(given)
    hidden, (inner, _) = given.size("embedding_length"), _mlp_shape(given)
    vision |= {"embed_dim": hidden, "mlp_ratio": inner // hidden, "hidden_size": given.text["hidden_size"]}
    return {"image_token_id": given.token("<|image_pad|>")}, vision, processor


def _mlp_shape(given: GivenEncoder) -> tuple[int, int]:
    """Inner and outer size of the first MLP; older files exchange the names of its maps."""
    rows, columns = given.shape("v.blk.0.ffn_up.weight", 2)
    return max(rows, columns), min(rows, columns)


def _qwen2_5_vl(given: GivenEncoder) -> EncoderSettings:
    vision, processor = _qwen_vision(given)
    pattern = given.size("n_wa_pattern")
    vision |= {
        "hidden_size": given.size("embedding_length"),
        "intermediate_size": given.size("feed_forward_length"),
        "out_hidden_size": given.text["hidden_size"],
        "window_size": given.size("window_size", _WINDOW),
        "fullatt_block_indexes": list(range(pattern - 1, vision["depth"], pattern)),
    }
    return {"image_token_id": given.token("<|image_pad|>", "<|IMAGE|>")}, vision, processor


def _qwen3_vl(given: GivenEncoder) -> EncoderSettings:
    vision, processor = _qwen_vision(given)
    tapped = given.keys.by_layer("vision.is_deepstack_layers") or []
    vision |= {
        "hidden_size": given.size("embedding_length"),
        "intermediate_size": given.size("feed_forward_length"),
        "out_hidden_size": given.text["hidden_size"],
        "num_position_embeddings": given.shape("v.position_embd.weight", 2)[0],
        "deepstack_visual_indexes": [index for index, is_tapped in enumerate(tapped) if is_tapped],
    }
    return {"image_token_id": given.token("<|image_pad|>")}, vision, processor


def _common(given: GivenEncoder) -> dict[str, Any]:
    """Settings of SigLIP's kind that all files have."""
    return {
        "hidden_size": given.size("embedding_length"),
        "intermediate_size": given.size("feed_forward_length"),
        "num_hidden_layers": given.num_layers(),
        "num_attention_heads": given.size("attention.head_count"),
        "patch_size": given.size("patch_size"),
        "layer_norm_eps": given.epsilon(),
    }


def _gemma3(given: GivenEncoder) -> EncoderSettings:
    vision = _common(given) | {"model_type": "siglip_vision_model", "image_size": given.size("image_size")}
    side = vision["image_size"] // vision["patch_size"] // given.size("projector.scale_factor", 4)
    config = {
        "mm_tokens_per_image": side**2,
        "image_token_index": given.token("<image_soft_token>"),
        "boi_token_index": given.token("<start_of_image>"),
        "eoi_token_index": given.token("<end_of_image>"),
    }
    processor = {"size": {"height": vision["image_size"]}}
    return config, vision, processor


def _gemma4(given: GivenEncoder) -> EncoderSettings:
    heads = given.size("attention.head_count")
    rows, key_rows = (given.shape(f"v.blk.0.attn_{part}.weight", 2)[0] for part in "qk")
    head_dim = max(1, rows // heads)
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": given.size("embedding_length"),
        "intermediate_size": given.size("feed_forward_length"),
        "num_hidden_layers": given.num_layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": key_rows // head_dim,
        "head_dim": head_dim,
        "patch_size": given.size("patch_size"),
        "pooling_kernel_size": given.size("projector.scale_factor", 3),
        "position_embedding_size": given.shape("v.position_embd.weight", 3)[1],
        "rms_norm_eps": given.epsilon(),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in given.tensors,
        "standardize": "v.std_bias" in given.tensors,
    }
    # The E-models, which alone have per-layer inputs, attend to images causally; files do not say it.
    is_causal = bool(given.text.get("hidden_size_per_layer_input"))
    config: dict[str, Any] = {
        "image_token_id": given.token("<|image|>"),
        "boi_token_id": given.token("<|image>"),
        "eoi_token_id": given.token("<image|>"),
        "text_config": {
            "use_bidirectional_attention": None if is_causal else "vision",
            "pad_token_id": given.vocabulary.find("tokenizer.ggml.padding_token_id", int),
        },
    }
    processor = {"patch_size": vision["patch_size"], "pooling_kernel_size": vision["pooling_kernel_size"]}
    return config, vision, processor


def _idefics3(given: GivenEncoder) -> EncoderSettings:
    vision = _common(given) | {"image_size": given.size("image_size")}
    config = {"scale_factor": given.size("projector.scale_factor", 2), "image_token_id": given.token("<image>")}
    processor: dict[str, Any] = {"max_image_size": {"longest_edge": vision["image_size"]}}
    longest = given.keys.find("vision.preproc_image_size", int)
    processor |= {"do_image_splitting": False} if not longest else {"size": {"longest_edge": longest}}
    return config, vision, processor


def _pixtral(given: GivenEncoder) -> EncoderSettings:
    silu = given.keys.find("use_silu", bool)
    vision = _common(given) | {
        "model_type": "pixtral",
        "image_size": given.size("image_size"),
        "hidden_act": "silu" if silu else "gelu",
        "layer_norm_eps": None,
    }
    given.expect_epsilon(_EPS)
    config: dict[str, Any] = {
        "image_token_index": given.token("[IMG]"),
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in given.tensors,
    }
    if MERGER in given.tensors:
        config |= {"spatial_merge_size": given.size("spatial_merge_size", 1), "text_config": _as_mistral(given.text)}
    else:
        config["vision_feature_select_strategy"] = "full"
    processor = {"size": {"longest_edge": vision["image_size"]}}
    return config, vision, processor


def _llama4(given: GivenEncoder) -> EncoderSettings:
    given.expect_epsilon(_EPS)
    vision = _common(given) | {
        "image_size": given.size("image_size"),
        "pixel_shuffle_ratio": 1 / given.size("projector.scale_factor", 2),
        "layer_norm_eps": None,
    }
    out = given.shape("mm.model.mlp.1.weight", 2)[0]
    vision |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), out)
    return {"image_token_index": given.token("<|patch|>")}, vision, {"size": {"height": vision["image_size"]}}


def _as_mistral(text: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a text model's config that make a Mistral of it, which files call Llama."""
    if text["architectures"][0] != "LlamaForCausalLM" or text.get("attention_bias") or text.get("mlp_bias"):
        return {}
    return {"model_type": "mistral", "sliding_window": None, "attention_bias": None, "mlp_bias": None}


def _lfm2(given: GivenEncoder) -> EncoderSettings:
    vision = _common(given) | {
        "model_type": "siglip2_vision_model",
        "num_patches": given.shape("v.position_embd.weight", 2)[0],
    }
    config = {
        "image_token_id": given.token("<image>"),
        "downsample_factor": given.size("projector.scale_factor", 2),
        "projector_hidden_size": given.shape("mm.1.weight", 2)[0],
        "projector_bias": "mm.1.bias" in given.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in given.tensors,
    }
    return config, vision, {}


def _internvl(given: GivenEncoder) -> EncoderSettings:
    size, tensors = given.size("image_size"), given.tensors
    vision = _common(given) | {
        "image_size": size,
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "use_mean_pooling": "v.post_ln.weight" not in tensors,
    }
    ratio = 1 / given.size("projector.scale_factor", 2)
    config = {"image_token_id": given.token("<IMG_CONTEXT>"), "downsample_ratio": ratio}
    processor = {
        "size": {"height": size},
        "min_patches": given.size("preproc_min_tiles", 1),
        "max_patches": given.size("preproc_max_tiles", 12),
    }
    return config, vision, processor


VISION_READERS: dict[str, Callable[[GivenEncoder], EncoderSettings]] = {
    "qwen2vl_merger": _qwen2_vl,
    "qwen2.5vl_merger": _qwen2_5_vl,
    "qwen2.5o": _qwen2_5_vl,
    "qwen3vl_merger": _qwen3_vl,
    "gemma3": _gemma3,
    "gemma4v": _gemma4,
    "idefics3": _idefics3,
    "pixtral": _pixtral,
    "llama4": _llama4,
    "lfm2": _lfm2,
    "internvl": _internvl,
}
"""By `clip.projector_type`."""
