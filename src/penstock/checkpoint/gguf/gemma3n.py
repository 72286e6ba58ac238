"""Converts the metadata of Gemma 3n to `config.json` keys."""

from typing import Any

from penstock.checkpoint.gguf.keys import Given


def read_gemma3n(given: Given) -> dict[str, Any]:
    """Gemma 3n's text; llama.cpp takes the base of sliding-window layers' RoPE, and the soft cap, as given."""
    from statistics import NormalDist  # here: files of other architectures have no need of it

    keys, count = given.keys, given.num_layers
    keys.expect("altup.active_idx", 0)
    sliding = keys.by_layer("attention.sliding_window_pattern")
    if sliding is None or len(sliding) != count:
        raise keys.unsupported("attention.sliding_window_pattern", sliding, f"it must have an entry for {count} layers")
    table = given.tensors.get("per_layer_token_embd.weight")
    laurel = given.tensors.get("blk.0.laurel_l.weight")
    deviations = keys.floats("activation_sparsity_scale")
    widths = keys.by_layer("feed_forward_length") if keys.is_array("feed_forward_length") else None
    return {
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding],
        "sliding_window": keys.need("attention.sliding_window", int),
        "rope_local_base_freq": keys.find("rope.freq_base_swa", float),
        "num_kv_shared_layers": keys.find("attention.shared_kv_layers", int),
        "intermediate_size": widths or given.config["intermediate_size"],
        "activation_sparsity_pattern": deviations and [NormalDist().cdf(deviation) for deviation in deviations],
        "altup_num_inputs": keys.find("altup.num_inputs", int),
        "laurel_rank": None if laurel is None else laurel.shape[0],
        "hidden_size_per_layer_input": keys.need("embedding_length_per_layer_input", int),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": given.has("attn_q.bias"),
        "final_logit_softcapping": keys.find("final_logit_softcapping", float),
    }
