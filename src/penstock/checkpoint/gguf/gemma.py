"""Converts the metadata of Gemma 1 to 3 to `config.json` keys."""

from typing import Any

from penstock.checkpoint.gguf.keys import Given


def read_gemma1(given: Given) -> dict[str, Any]:
    """Gemma 1."""
    return {"hidden_act": "gelu_pytorch_tanh", "attention_bias": given.has("attn_q.bias")}


def _read_gemma(given: Given) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": given.keys.find("attention.sliding_window", int),
        "attention_bias": given.has("attn_q.bias"),
    }


def read_gemma2(given: Given) -> dict[str, Any]:
    """Gemma 2."""
    return {
        **_read_gemma(given),
        "query_pre_attn_scalar": _scaled_by(given, 46),
        "attn_logit_softcapping": given.keys.find("attn_logit_softcapping", float),
        "final_logit_softcapping": given.keys.find("final_logit_softcapping", float),
    }


def read_gemma3(given: Given) -> dict[str, Any]:
    """Gemma 3."""
    return {
        **_read_gemma(given),
        "query_pre_attn_scalar": _scaled_by(given, 62),
        "final_logit_softcapping": given.keys.find("final_logit_softcapping", float),
        "rope_local_base_freq": given.keys.find("rope.freq_base_swa", float),
        "sliding_window_pattern": given.keys.find("attention.sliding_window_pattern", int),
    }


def _scaled_by(given: Given, layers_of_largest: int) -> int:
    """`query_pre_attn_scalar`; the family's largest model, recognized by its number of layers, has another value."""
    if given.num_layers == layers_of_largest:
        return int(given.config["hidden_size"] // given.config["num_attention_heads"])
    return int(given.config["head_dim"])
