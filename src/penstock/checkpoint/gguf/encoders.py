"""Converts the metadata of encoders to `config.json` keys."""

from typing import Any

from penstock.checkpoint.gguf.keys import Given

_POOLINGS = {1: "mean", 2: "cls"}
_ACTIVATIONS = {"gelu": "gelu", "silu": "silu"}


def read_modern_bert(given: Given) -> dict[str, Any]:
    """ModernBert; with `cls.output.weight` it is a reranker."""
    keys, config = given.keys, given.config
    activation = keys.find("hidden_activation", str) or "gelu"
    if activation not in _ACTIVATIONS:
        raise keys.unsupported("hidden_activation", activation, f"supported: {', '.join(_ACTIVATIONS)}")
    found = {
        **dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "rope_scaling")),
        "norm_eps": config["rms_norm_eps"],
        "norm_bias": "output_norm.bias" in given.tensors,
        "attention_bias": given.has("attn_qkv.bias"),
        "mlp_bias": given.has("ffn_up.bias"),
        "hidden_activation": _ACTIVATIONS[activation],
        "local_attention": keys.find("attention.sliding_window", int),
        "global_attn_every_n_layers": keys.find("attention.sliding_window_pattern", int),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": keys.find("rope.freq_base_swa", float) or config["rope_theta"],
    }
    pooling = keys.find("classifier.pooling_type", int) or 1
    output = given.tensors.get("cls.output.weight")
    if output is None:
        return found
    if pooling not in _POOLINGS:
        raise keys.unsupported("classifier.pooling_type", pooling, "1 (mean) and 2 (cls) are")
    return {
        **found,
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": _POOLINGS[pooling],
        "classifier_bias": "cls.bias" in given.tensors,
        "num_labels": output.shape[0],
    }
