"""Converts the metadata of GPT-2 and its relatives, with layer norms and fused matrices, to `config.json` keys."""

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.gguf.keys import Given, layer_norm_eps


def read_gpt_neox(given: Given) -> dict[str, Any]:
    """GPT-NeoX."""
    return {
        **layer_norm_eps(given),
        "attention_bias": given.has("attn_qkv.bias"),
        "use_parallel_residual": given.keys.find("use_parallel_residual", bool),
    }


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "rms_norm_eps": "layer_norm_epsilon",
}


def read_gpt2(given: Given) -> dict[str, Any]:
    """GPT-2."""
    return _renamed(given, _GPT2_NAMES)


_BLOOM_NAMES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layer_norm_epsilon",
}


def read_bloom(given: Given) -> dict[str, Any]:
    """BLOOM."""
    _expect_sizes(given)
    return {**_renamed(given, _BLOOM_NAMES), "intermediate_size": None}


_MPT_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "layer_norm_epsilon",
}


def read_mpt(given: Given) -> dict[str, Any]:
    """MPT."""
    _expect_sizes(given)
    attention = {
        "clip_qkv": given.keys.find("attention.clamp_kqv", float) or None,
        "alibi_bias_max": given.keys.find("attention.max_alibi_bias", float) or None,
        "alibi": given.keys.find("attention.max_alibi_bias", float) != 0.0,
        "qk_ln": given.has("attn_q_norm.weight"),
    }
    return {
        **_renamed(given, _MPT_NAMES),
        "intermediate_size": None,
        "attn_config": {key: value for key, value in attention.items() if value is not None},
        "no_bias": not given.has("attn_qkv.bias"),
    }


def _renamed(given: Given, names: Mapping[str, str]) -> dict[str, Any]:
    """A config's own names of common keys. Their common names, and keys that these families lack, become None."""
    lacking = dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", *names))
    return {**lacking, **{own: given.config[name] for name, own in names.items()}}


def _expect_sizes(given: Given) -> None:
    """MLPs four times as wide as the hidden states, and keys for each head: their configs have no other sizes."""
    given.keys.expect("feed_forward_length", 4 * given.config["hidden_size"])
    given.keys.expect("attention.head_count_kv", given.config["num_attention_heads"])


def read_gpt_bigcode(given: Given) -> dict[str, Any]:
    """StarCoder (GPT-BigCode)."""
    given.keys.expect("attention.head_count_kv", 1)
    return {**read_gpt2(given), "multi_query": True}


def read_falcon(given: Given) -> dict[str, Any]:
    """Falcon; the number of key heads, or a second norm, tells its version."""
    heads, of_keys = (given.config[key] for key in ("num_attention_heads", "num_key_value_heads"))
    grouped, two_norms = of_keys not in (1, heads), given.has("attn_norm_2.weight")
    return {
        "num_kv_heads": of_keys,
        "num_key_value_heads": None,
        "ffn_hidden_size": given.config["intermediate_size"],
        "intermediate_size": None,
        "layer_norm_epsilon": given.config["rms_norm_eps"],
        "rms_norm_eps": None,
        "new_decoder_architecture": grouped or two_norms,
        "num_ln_in_parallel_attn": 1 + two_norms if grouped or two_norms else None,
        "multi_query": of_keys == 1,
        "bias": given.has("attn_qkv.bias"),
    }
