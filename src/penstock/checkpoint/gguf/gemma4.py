"""Converts the metadata of Gemma 4 to `config.json` keys."""

from typing import Any

from penstock.checkpoint.gguf.keys import Given
from penstock.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_gemma4(given: Given) -> dict[str, Any]:
    """Dense models, E-models and mixtures of experts; the sizes and tensors of a file tell which it holds."""
    keys = given.keys
    kinds = _kinds(given)
    shared = keys.find("attention.shared_kv_layers", int) or 0
    own_full = [index for index, kind in enumerate(kinds) if kind == _FULL and index < given.num_layers - shared]
    per_layer = keys.find("embedding_length_per_layer_input", int) or 0
    return {
        **_heads(given, kinds),
        **_ropes(given),
        **_widths(given, shared),
        **_experts(given),
        "layer_types": kinds,
        "sliding_window": keys.need("attention.sliding_window", int),
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": not all(given.layers_with("attn_v.weight")[index] for index in own_full),
        "attention_bias": given.has("attn_q.bias"),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": _rows(given, "per_layer_token_embd.weight") if per_layer else None,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": keys.find("final_logit_softcapping", float),
    }


def _kinds(given: Given) -> list[str]:
    sliding = given.keys.by_layer("attention.sliding_window_pattern")
    if sliding is None or len(sliding) != given.num_layers:
        raise given.keys.unsupported(
            "attention.sliding_window_pattern",
            sliding,
            f"it must have one entry for each of the {given.num_layers} layers",
        )
    return [_SLIDING if is_sliding else _FULL for is_sliding in sliding]


def _heads(given: Given, kinds: list[str]) -> dict[str, Any]:
    """Sizes and numbers of heads; the keys without `swa` apply to full-attention layers."""
    wide, size = given.config["head_dim"], given.keys.need("attention.key_length_swa", int)
    given.keys.expect("attention.value_length_swa", size)
    given.keys.expect("rope.dimension_count_swa", size)
    heads: dict[str, int | None] = {_SLIDING: given.config["num_key_value_heads"], _FULL: None}
    if given.keys.is_array("attention.head_count_kv"):
        heads |= dict(zip(kinds, given.keys.by_layer("attention.head_count_kv") or (), strict=False))
    return {
        "head_dim": size,
        "global_head_dim": wide,
        "num_key_value_heads": heads[_SLIDING],
        "num_global_key_value_heads": heads[_FULL],
    }


def _ropes(given: Given) -> dict[str, Any]:
    """RoPE settings. The file's frequency factors apply to full attention; a huge factor disables a frequency."""
    full = {"rope_type": "default", **(given.config["rope_scaling"] or {}), "rope_theta": given.config["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": given.keys.find("rope.freq_base_swa", float) or 1e4}
    return {"rope_scaling": None, "rope_theta": None, "rope_parameters": {_FULL: full, _SLIDING: local}}


def _widths(given: Given, shared: int) -> dict[str, Any]:
    """MLP widths; in layers that share the KV cache of another layer they may be doubled."""
    widths = given.keys.by_layer("feed_forward_length") if given.keys.is_array("feed_forward_length") else None
    if not widths:
        return {}
    own = given.num_layers - shared
    double = shared > 0 and widths[-1] == 2 * widths[0]
    if widths != [widths[0] * (1 + (double and index >= own)) for index in range(given.num_layers)]:
        raise given.keys.unsupported("feed_forward_length", widths, "one size, doubled in layers that share keys, is")
    return {"intermediate_size": widths[0], "use_double_wide_mlp": double}


def _experts(given: Given) -> dict[str, Any]:
    experts, inner = given.keys.find("expert_count", int), given.keys.find("expert_feed_forward_length", int)
    used = given.keys.find("expert_used_count", int)
    if not experts:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": used,
        "moe_intermediate_size": inner,
    }


def _rows(given: Given, name: str) -> int:
    if name not in given.tensors:
        raise CheckpointError(f"the file has embedding_length_per_layer_input, but lacks the tensor {name}")
    return given.tensors[name].shape[0]
