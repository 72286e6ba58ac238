"""Converts the metadata of mixtures of experts to `config.json` keys."""

from typing import Any

from penstock.checkpoint.gguf.keys import NULL, Given, Keys

_SIGMOID = 2
"""`expert_gating_func`: 1 is softmax, 2 sigmoid, 3 softmax over the chosen experts."""


def read_experts(keys: Keys) -> dict[str, Any]:
    """The number of experts and of experts per token; empty for a model without experts."""
    experts = keys.find("expert_count", int)
    if not experts:
        keys.ignore("expert_used_count")
        return {}
    return {"num_local_experts": experts, "num_experts_per_tok": keys.need("expert_used_count", int)}


def read_qwen3_moe(given: Given) -> dict[str, Any]:
    """Qwen3's mixtures of experts."""
    return {
        **read_experts(given.keys),
        "attention_bias": given.has("attn_q.bias"),
        "moe_intermediate_size": given.keys.find("expert_feed_forward_length", int),
        "norm_topk_prob": True,
    }


def read_qwen2_moe(given: Given) -> dict[str, Any]:
    """Qwen2's mixtures of experts."""
    return {
        **read_experts(given.keys),
        "num_local_experts": None,
        "num_experts": given.keys.need("expert_count", int),
        "qkv_bias": given.has("attn_q.bias"),
        "moe_intermediate_size": given.keys.find("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": given.keys.find("expert_shared_feed_forward_length", int),
        "norm_topk_prob": False,
    }


def read_gpt_oss(given: Given) -> dict[str, Any]:
    """gpt-oss; its YaRN does not truncate the correction range, which the file does not state."""
    scaling = given.config["rope_scaling"]
    inner = given.keys.find("expert_feed_forward_length", int)
    return {
        **read_experts(given.keys),
        "sliding_window": given.keys.need("attention.sliding_window", int),
        "intermediate_size": inner or given.config["intermediate_size"],
        "rope_scaling": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False},
    }


def read_sigmoid_experts(given: Given) -> dict[str, Any]:
    """Sigmoid routing over expert groups, shared experts, and leading dense layers."""
    keys = given.keys
    experts = read_experts(keys)
    return {
        "num_experts_per_tok": experts.get("num_experts_per_tok"),
        "n_routed_experts": experts.get("num_local_experts"),
        "n_shared_experts": keys.find("expert_shared_count", int),
        "moe_intermediate_size": keys.find("expert_feed_forward_length", int),
        "first_k_dense_replace": keys.find("leading_dense_block_count", int),
        "routed_scaling_factor": keys.find("expert_weights_scale", float),
        "norm_topk_prob": keys.find("expert_weights_norm", bool),
        "n_group": keys.find("expert_group_count", int),
        "topk_group": keys.find("expert_group_used_count", int),
        "num_nextn_predict_layers": int(given.has_mtp_head),
    }


def read_glm4_moe(given: Given) -> dict[str, Any]:
    """GLM 4.5 to 4.7."""
    given.keys.expect("expert_gating_func", _SIGMOID)
    return {
        **read_sigmoid_experts(given),
        "first_k_dense_replace": given.layers_with("ffn_gate_inp.weight").count(False),
        "attention_bias": given.has("attn_q.bias"),
        "use_qk_norm": given.has("attn_q_norm.weight"),
    }


def read_dots1(given: Given) -> dict[str, Any]:
    """dots.llm1."""
    given.keys.expect("expert_gating_func", _SIGMOID)
    given.keys.ignore("expert_shared_feed_forward_length")
    return {
        **read_sigmoid_experts(given),
        "num_nextn_predict_layers": None,
        "attention_bias": given.has("attn_q.bias"),
        "sliding_window": given.keys.find("attention.sliding_window", int) or NULL,
    }


def read_bailing_moe_v2(given: Given) -> dict[str, Any]:
    """Ling 2 and Ring 2."""
    experts = read_exaone_moe(given)
    return {
        **experts,
        "n_group": experts["n_group"] or 1,
        "topk_group": experts["topk_group"] or 1,
        "use_qkv_bias": given.has("attn_qkv.bias"),
        "use_bias": given.has("attn_output.bias"),
        "use_qk_norm": given.has("attn_q_norm.weight"),
    }


def read_afmoe(given: Given) -> dict[str, Any]:
    """Arcee's Trinity; llama.cpp takes every fourth layer to see all, and embeddings to be scaled."""
    keys, experts = given.keys, read_experts(given.keys)
    keys.expect("expert_gating_func", _SIGMOID)
    keys.expect("expert_weights_norm", True)
    return {
        "num_experts": experts.get("num_local_experts"),
        "num_experts_per_tok": experts.get("num_experts_per_tok"),
        "num_shared_experts": keys.find("expert_shared_count", int),
        "moe_intermediate_size": keys.find("expert_feed_forward_length", int),
        "num_dense_layers": keys.find("leading_dense_block_count", int),
        "route_scale": keys.find("expert_weights_scale", float),
        "sliding_window": keys.need("attention.sliding_window", int),
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
        "attention_bias": given.has("attn_q.bias"),
    }


def read_exaone_moe(given: Given) -> dict[str, Any]:
    """The experts of EXAONE's mixtures, which have other names in config.json than DeepSeek's."""
    given.keys.expect("expert_gating_func", _SIGMOID)
    given.keys.ignore("expert_shared_feed_forward_length")
    experts = read_sigmoid_experts(given)
    return {
        **experts,
        "num_nextn_predict_layers": None,
        "n_routed_experts": None,
        "num_experts": experts["n_routed_experts"],
        "n_shared_experts": None,
        "num_shared_experts": experts["n_shared_experts"],
    }


def read_ernie4_5_moe(given: Given) -> dict[str, Any]:
    """ERNIE 4.5's mixtures of experts; the file does not state the last layer with experts."""
    keys = given.keys
    experts = read_experts(keys)
    keys.ignore("leading_dense_block_count", "expert_shared_feed_forward_length")
    sparse = [index for index, has in enumerate(given.layers_with("ffn_gate_inp.weight")) if has]
    return {
        "moe_num_experts": experts.get("num_local_experts"),
        "moe_k": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": keys.find("expert_feed_forward_length", int),
        "moe_num_shared_experts": keys.find("expert_shared_count", int) or 0,
        "moe_layer_start_index": min(sparse, default=given.num_layers),
        "moe_layer_end_index": max(sparse, default=-1),
        "moe_layer_interval": keys.find("interleave_moe_layer_step", int) or 1,
        "use_bias": given.has("attn_q.bias"),
    }


def read_hunyuan_moe(given: Given) -> dict[str, Any]:
    """The experts of Hunyuan A13B, as many of them in all layers."""
    keys = given.keys
    experts = read_experts(keys)
    keys.ignore("expert_shared_feed_forward_length")
    keys.expect("expert_shared_count", 1)
    return {
        "num_experts": experts.get("num_local_experts"),
        "moe_topk": experts.get("num_experts_per_tok"),
        "intermediate_size": keys.find("expert_feed_forward_length", int) or given.config["intermediate_size"],
    }


def read_minimax_m2(given: Given) -> dict[str, Any]:
    """MiniMax M2."""
    given.keys.expect("expert_gating_func", _SIGMOID)
    inner = given.keys.find("expert_feed_forward_length", int)
    return {**read_experts(given.keys), "intermediate_size": inner or given.config["intermediate_size"]}


_LLAMA4_CHUNK = 8192
_WITHOUT_NORMS = 128
"""Number of experts of Llama 4 Maverick, which does not normalize queries and keys; files do not state that, nor the
chunk size above."""


def read_llama4(given: Given) -> dict[str, Any]:
    """Llama 4; a sliding window of 0 means full attention with RoPE in every layer."""
    keys, layers = given.keys, given.num_layers
    experts = keys.need("expert_count", int)
    all_see = keys.find("attention.sliding_window", int) == 0
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": keys.need("expert_used_count", int),
        "intermediate_size": keys.need("expert_feed_forward_length", int),
        "intermediate_size_mlp": given.config["intermediate_size"],
        "interleave_moe_layer_step": keys.need("interleave_moe_layer_step", int),
        "use_qk_norm": experts != _WITHOUT_NORMS,
        "attention_bias": given.has("attn_q.bias"),
        "attention_chunk_size": _LLAMA4_CHUNK,
        "layer_types": ["full_attention"] * layers if all_see else None,
        "no_rope_layers": [1] * layers if all_see else None,
    }


def read_phimoe(given: Given) -> dict[str, Any]:
    """Phi-3.5-MoE; the file has one attention factor for short and long contexts."""
    scaling = given.config["rope_scaling"]
    if scaling is not None:
        factor = scaling.get("attention_factor", 1.0)
        rest = {key: value for key, value in scaling.items() if key != "attention_factor"}
        scaling = {**rest, "short_mscale": factor, "long_mscale": factor}
    return {
        **read_experts(given.keys),
        "rope_scaling": scaling,
        "attention_bias": given.has("attn_q.bias"),
        "lm_head_bias": "output.bias" in given.tensors,
        "sliding_window": given.keys.find("attention.sliding_window", int) or None,  # 0: no window
        "original_max_position_embeddings": given.keys.find("rope.scaling.original_context_length", int),
    }


def read_deepseek2(given: Given) -> dict[str, Any]:
    """DeepSeek V2 and V3, and GLM 4.7 Flash and Youtu, which have the same architecture in GGUF files.

    All heads share the latent, so files declare one KV head, as wide as a token's cache entry.
    """
    keys = given.keys
    sigmoids = keys.find("expert_gating_func", int) == _SIGMOID or given.has("exp_probs_b.bias")
    keys.ignore("attention.value_length")
    rotated = keys.need("rope.dimension_count", int)
    key = keys.find("attention.key_length_mla", int) or keys.need("attention.key_length", int)
    experts = read_sigmoid_experts(given)
    groups = experts["n_group"] or 1
    sparse = given.layers_with("ffn_gate_inp.weight")
    common = {
        **experts,
        "first_k_dense_replace": sparse.count(False),
        "head_dim": rotated,
        "partial_rotary_factor": None,
        "num_key_value_heads": given.config["num_attention_heads"],
        "kv_lora_rank": keys.need("attention.kv_lora_rank", int),
        "q_lora_rank": keys.find("attention.q_lora_rank", int),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": keys.find("attention.value_length_mla", int) or keys.need("attention.value_length", int),
        "attention_bias": given.has("attn_kv_a_mqa.bias"),
        "rope_scaling": _stretched(given),
    }
    if experts["n_routed_experts"] is None:
        return {**common, **dict.fromkeys(experts), "architectures": ["YoutuForCausalLM"]}
    if sigmoids:
        common["norm_topk_prob"] = bool(experts["norm_topk_prob"])
        if sparse == sorted(sparse):
            return common
        kinds = ["sparse" if is_sparse else "dense" for is_sparse in sparse]  # GLM may mix them in any order
        layers = {"mlp_layer_types": kinds, "first_k_dense_replace": None}
        return {**common, **layers, "architectures": ["Glm4MoeLiteForCausalLM"]}
    grouped = "group_limited_greedy" if groups > 1 else "greedy"
    return {**common, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": grouped, "norm_topk_prob": False}


def read_glm_dsa(given: Given) -> dict[str, Any]:
    """GLM 5: DeepSeek V3's keys, and those of the indexer."""
    return {**read_deepseek32(given), "architectures": ["GlmMoeDsaForCausalLM"]}


def read_deepseek32(given: Given) -> dict[str, Any]:
    """DeepSeek V3.2: DeepSeek V3's keys, and those of the indexer."""
    given.keys.ignore("attention.indexer.head_count", "attention.indexer.key_length")
    return {
        **read_deepseek2(given),
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_topk": given.keys.need("attention.indexer.top_k", int),
    }


def read_mistral4(given: Given) -> dict[str, Any]:
    """Mistral 4: DeepSeek's latent attention, softmax routing; files may lack the query scale by position."""
    given.keys.expect("expert_gating_func", 1)
    latents = read_deepseek2(given)
    scaling = latents["rope_scaling"] or {"rope_type": "default"}
    beta = given.keys.find("attention.temperature_scale", float)
    given.keys.ignore("attention.temperature_length")  # the original context
    return {
        **latents,
        **dict.fromkeys(("head_dim", "num_nextn_predict_layers", "topk_method", "rope_theta", "rope_scaling")),
        "architectures": ["Mistral4ForCausalLM"],
        "norm_topk_prob": bool(given.keys.find("expert_weights_norm", bool)),
        "rope_parameters": {
            **scaling,
            "rope_theta": given.config["rope_theta"] or 10000.0,
            **({} if beta is None else {"llama_4_scaling_beta": beta}),
        },
    }


def read_hy_v3(given: Given) -> dict[str, Any]:
    """Hunyuan 3; a layer's tensors tell whether it has experts."""
    keys = given.keys
    keys.expect("expert_gating_func", _SIGMOID)
    keys.expect("expert_weights_norm", True)
    experts, inner = read_experts(keys), keys.need("expert_feed_forward_length", int)
    shared = keys.find("expert_shared_feed_forward_length", int) or inner
    if inner < 1 or shared % inner:
        raise keys.unsupported("expert_shared_feed_forward_length", shared, f"it must be a multiple of {inner}")
    sparse = given.layers_with("ffn_gate_inp.weight")
    keys.ignore("expert_shared_count", "leading_dense_block_count")
    return {
        "attention_bias": given.has("attn_q.bias"),
        "num_experts": experts.get("num_local_experts"),
        "num_experts_per_tok": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": inner,
        "num_shared_experts": shared // inner,
        "router_scaling_factor": keys.find("expert_weights_scale", float),
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
    }


def _stretched(given: Given) -> dict[str, Any] | None:
    """The YaRN settings with `mscale` and `mscale_all_dim`, which are equal; files hold a tenth of their value."""
    scaling: dict[str, Any] | None = given.config["rope_scaling"]
    stretch = given.keys.find("rope.scaling.yarn_log_multiplier", float)
    if scaling is None or stretch is None:
        return scaling
    return {**scaling, "mscale": 10 * stretch, "mscale_all_dim": 10 * stretch}
