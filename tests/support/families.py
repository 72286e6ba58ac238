"""Configurations of the random checkpoints of every family, by which the tests compare with `transformers`."""

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA4: dict[str, Any] = {
    "head_dim": 12,
    "intermediate_size": 40,
    "intermediate_size_mlp": 56,
    "num_local_experts": 5,
    "attention_chunk_size": 11,
    "floor_scale": 8,
    "attn_scale": 0.3,
}
LATENTS = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
LOUD = {"initializer_range": 0.5}
"""Weights large enough for scores and logits to reach their caps."""
MINISTRAL = rope(
    "yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0
)
MINISTRAL_LATENTS = {"rope_parameters": {**MINISTRAL["rope_parameters"], "partial_rotary_factor": 0.4}}
INDEXER = {"index_topk": 200, "index_n_heads": 2, "index_head_dim": 16}
LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(6)],
    long_factor=[2.0 + 0.5 * i for i in range(6)],
)
GEMMA4: dict[str, Any] = {
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 160,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA: dict[str, Any] = {
    "num_local_experts": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 80,
    "mamba_n_heads": 6,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 5.0,
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # which transformers heeds in prompts alone
    "use_bias": True,
    "mlp_bias": True,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
LFM2_MOE: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
TWO: dict[str, Any] = {"num_hidden_layers": 2}
"""Layers of the families that have one kind of layer."""
SHARED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
    "num_experts": 5,
    "mamba_d_state": 6,
    "mamba_dt_rank": 7,
}
KIMI: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 12,
    "linear_num_heads": 4,
}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 72,
    "mamba_n_heads": 6,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "head_dim": 16,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.6,
    "key_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.2, 0.6, 1.4, 0.8],
    "mlp_multipliers": [0.8, 1.7],
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 5.0,
}


def class_name(family: str) -> str:
    """The name of a family's causal language model in `transformers`."""
    return {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, each query head with its own key head": ("Llama", {"num_key_value_heads": 4}),
    "llama, two query heads to a key head": ("Llama", {}),
    "llama, four to one": ("Llama", {"num_attention_heads": 8, "head_dim": 12}),
    "llama, all to one": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, wide heads": ("Llama", {"head_dim": 20}),
    "llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear rope": ("Llama", rope("linear", factor=3.0)),
    "llama, llama3 rope": ("Llama", LLAMA3),
    "llama, yarn rope": ("Llama", YARN),
    "llama, yarn with every setting": (
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.8,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "llama, yarn with an attention factor": (
        "Llama",
        YARN | {"rope_parameters": {**YARN["rope_parameters"], "attention_factor": 1.3}},
    ),
    "llama, llama3 rope with a step": (
        "Llama",
        LLAMA3 | {"rope_parameters": {**LLAMA3["rope_parameters"], "high_freq_factor": 1.0}},
    ),
    "llama4": (
        "Llama4",
        LLAMA4 | {"num_hidden_layers": 4, "num_experts_per_tok": 1, "no_rope_layer_interval": 2},
    ),
    "llama4, two of some experts, some layers without, biases": (
        "Llama4",
        LLAMA4
        | LLAMA3
        | {
            "num_hidden_layers": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [0, 1, 1, 0],
            "layer_types": ["full_attention", "chunked_attention", "full_attention", "chunked_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama4, one expert, queries as they are": (
        "Llama4",
        LLAMA4
        | {
            "num_local_experts": 1,
            "moe_layers": [1],
            "no_rope_layers": [1, 0, 1],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
    "granite": ("Granite", GRANITE),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 20, "tie_word_embeddings": True}),
    "ernie 4.5, biases, llama3 rope": (
        "Ernie4_5",
        {"head_dim": 12, "use_bias": True, "tie_word_embeddings": False, **LLAMA3},
    ),
    "exaone 4": ("Exaone4", {"sliding_window": 9, "num_hidden_layers": 5, **LLAMA3}),
    "exaone 4, every second layer slides": (
        "Exaone4",
        {"sliding_window": 7, "sliding_window_pattern": 2, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "exaone 4, nothing slides": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "gemma2": ("Gemma2", {"head_dim": 20, "query_pre_attn_scalar": 13, "sliding_window": 9, **LOUD}),
    "gemma2, other caps, biases": (
        "Gemma2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
        },
    ),
    "gemma2, no caps": ("Gemma2", {"head_dim": 12, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {"head_dim": 20, "query_pre_attn_scalar": 13, "sliding_window": 9, "num_hidden_layers": 7}),
    "gemma3, stretched, caps": (
        "Gemma3",
        {
            "head_dim": 16,
            "final_logit_softcapping": 1.5,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {"head_dim": 16, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12}
        | {"vocab_size_per_layer_input": 150, "laurel_rank": 10, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2}
        | {"intermediate_size": [64, 80, 80, 56, 80], "activation_sparsity_pattern": [0.7, 0.0, 0.9, 0.0, 0.0]},
    ),
    "gemma4": ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 0, "layer_types": None, "num_hidden_layers": 7}),
    "gemma4, per-layer embeddings, shared keys": (
        "Gemma4",
        GEMMA4
        | {
            "num_kv_shared_layers": 3,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4, shared keys, biases, not tied": (
        "Gemma4",
        GEMMA4
        | {
            "num_kv_shared_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 2.5,
            "vocab_size_per_layer_input": 170,
        },
    ),
    "gemma4 mixture, values are keys": (
        "Gemma4",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4 mixture, one expert": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 1,
            "top_k_experts": 1,
            "moe_intermediate_size": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0},
                "sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
            },
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4, turned otherwise, no biases": (
        "Glm4",
        {
            "head_dim": 20,
            "attention_bias": False,
            **rope("default", partial_rotary_factor=0.6),
            "num_key_value_heads": 1,
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, **MINISTRAL}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
    "olmo2, two to one, biases": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 5}),
    "olmo3, yarn where all is seen": (
        "Olmo3",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**YARN["rope_parameters"], "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3, partly turned, sliding": (
        "Phi3",
        {"sliding_window": 9, **rope("default", partial_rotary_factor=0.5)},
    ),
    "phi3, longrope, not stretched": ("Phi3", LONGROPE | {"original_max_position_embeddings": 256}),
    "phimoe": ("Phimoe", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "phimoe, biases, sliding, few experts": (
        "Phimoe",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 9,
            "router_jitter_noise": 0.2,
        },
    ),
    "phimoe, tied, with a bias of the output": (
        "Phimoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3, other layers, biases, sliding": (
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5, tied, heads of values of their own, three taps": (
        "Qwen3_5",
        {
            **DELTA,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3.5 mixture": (
        "Qwen3_5Moe",
        {**DELTA, **QWEN_EXPERTS},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**DELTA, **QWEN_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "granite hybrid": ("GraniteMoeHybrid", MAMBA),
    "granite hybrid, groups, limits, turned": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
            "attention_bias": True,
        },
    ),
    "granite hybrid, experts": (
        "GraniteMoeHybrid",
        {**MAMBA, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h, no biases, no groups": (
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "use_bias": False,
            "use_conv_bias": False,
            "mlp_bias": False,
            "n_groups": 1,
        },
    ),
    "nemotron-h, an mlp and experts first": (
        "NemotronH",
        NEMOTRON | {"layers_block_type": ["mlp", "moe", "full_attention", "linear_attention"]},
    ),
    "nemotron-h, latent experts, not renormalised": (
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["full_attention", "moe", "moe", "linear_attention", "moe"],
            "moe_latent_size": 20,
            "norm_topk_prob": False,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "lfm2 moe": ("Lfm2Moe", LFM2_MOE),
    "lfm2 moe, not renormalised, no correction": (
        "Lfm2Moe",
        {
            **LFM2_MOE,
            "num_dense_layers": 0,
            "norm_topk_prob": False,
            "use_expert_bias": False,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "lfm2, biases, four taps, a size of its own": (
        "Lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "deepseek v2": ("DeepseekV2", LATENTS | {"q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "greedy"}),
    "deepseek v2, groups, yarn, biases": (
        "DeepseekV2",
        LATENTS
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707)
        | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "attention_bias": True},
    ),
    "deepseek v3": ("DeepseekV3", LATENTS | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
    "deepseek v3, rotated in halves": (
        "DeepseekV3",
        LATENTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "rope_interleave": False},
    ),
    "glm 4 moe lite": ("Glm4MoeLite", LATENTS | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, sliding": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, upper layers sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3, tied, all to one, biases": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "qwen3, some layers sliding": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 moe, a layer without experts": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe, every second layer, not renormalised, sliding, biases": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3 moe, one expert": (
        "Qwen3Moe",
        {"head_dim": 12, "num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 40},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral, all experts, sliding": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 9, "head_dim": 20},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "gpt-oss, all layers see all, one expert": (
        "GptOss",
        {
            "head_dim": 24,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "olmoe, not renormalised": ("Olmoe", {"num_experts": 3, "num_experts_per_tok": 1, "attention_bias": True}),
    "olmoe, clipped": ("Olmoe", TWO | {"num_experts": 3, "num_experts_per_tok": 2, "clip_qkv": 0.4}),
    "glm4 moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm4 moe, biases, not renormalised": (
        "Glm4Moe",
        {
            "head_dim": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "afmoe": (
        "Afmoe",
        {"head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": 9}
        | {"layer_types": None, "global_attn_every_n_layers": 2, "mup_enabled": True, "route_scale": 1.5},
    ),
    "arcee": ("Arcee", TWO),
    "arcee, biases, yarn": ("Arcee", TWO | YARN | {"attention_bias": True, "mlp_bias": True}),
    "dots1": ("Dots1", TWO | SHARED_EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "sliding_window": None}),
    "dots1, the upper layer sliding, biases": (
        "Dots1",
        TWO
        | SHARED_EXPERTS
        | {"sliding_window": 9, "max_window_layers": 1, "attention_bias": True, "routed_scaling_factor": 1.5},
    ),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        TWO | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "use_bias": True},
    ),
    "ernie 4.5 moe, every second layer, none shared": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 0,
            "num_hidden_layers": 4,
        }
        | {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 2},
    ),
    "apertus": ("Apertus", TWO),
    "apertus, biases, turned otherwise, not by xielu": (
        "Apertus",
        TWO | rope("linear", factor=2.0) | {"attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True},
    ),
    "hunyuan": ("HunYuanDenseV1", TWO | {"head_dim": 16, "attention_bias": True}),
    "hunyuan, a fixed alpha": (
        "HunYuanDenseV1",
        TWO | rope("dynamic", factor=1.0, alpha=50.0) | {"head_dim": 12, "tie_word_embeddings": True},
    ),
    "hunyuan moe": (
        "HunYuanMoEV1",
        TWO | {"head_dim": 16, "num_experts": 6, "moe_topk": [2, 3], "intermediate_size": 40},
    ),
    "hunyuan moe, biases": (
        "HunYuanMoEV1",
        TWO | {"head_dim": 12, "num_experts": 4, "moe_topk": 2, "intermediate_size": 24, "attention_bias": True},
    ),
    "cohere": ("Cohere", TWO),
    "cohere, biases, another scale, not tied": (
        "Cohere",
        TWO | {"attention_bias": True, "logit_scale": 0.3, "tie_word_embeddings": False, **LLAMA3},
    ),
    "cohere2": ("Cohere2", {"sliding_window": 9, "num_hidden_layers": 4}),
    "cohere2, another pattern, biases": (
        "Cohere2",
        TWO | {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": True},
    ),
    "gpt-neox": ("GPTNeoX", TWO | {"num_attention_heads": 2}),
    "gpt-neox, one after the other, no biases, tied": (
        "GPTNeoX",
        TWO
        | rope("default", partial_rotary_factor=0.5)
        | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}
        | {"num_attention_heads": 2},
    ),
    "phi": ("Phi", TWO),
    "phi, turned otherwise": (
        "Phi",
        TWO | rope("linear", factor=2.0, partial_rotary_factor=0.7) | {"num_key_value_heads": 4, "hidden_act": "gelu"},
    ),
    "deepseek v3.2": (
        "DeepseekV32",
        LATENTS | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **INDEXER},
    ),
    "glm 5": (
        "GlmMoeDsa",
        LATENTS | INDEXER | {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 1},
    ),
    "mistral4": ("Mistral4", TWO | LATENTS | MINISTRAL_LATENTS),
    "mistral4, a dense layer, not renormalised, without ranks of queries": (
        "Mistral4",
        TWO
        | LATENTS
        | MINISTRAL_LATENTS
        | {"first_k_dense_replace": 1, "norm_topk_prob": False, "q_lora_rank": None, "rope_interleave": False},
    ),
    "bamba": (
        "Bamba",
        {"num_attention_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_state": 12}
        | {"mamba_chunk_size": 16, "mamba_n_groups": 2},
    ),
    "bamba, biases": (
        "Bamba",
        {"head_dim": 16, "attn_layer_indices": [0], "mamba_n_heads": 6, "mamba_d_state": 12, "mamba_chunk_size": 16}
        | {"attention_bias": True, "mlp_bias": True, "mamba_conv_bias": False, "mamba_proj_bias": True, **TWO},
    ),
    "granite swa": (
        "GraniteSWA",
        GRANITE | {"sliding_window": 9, "layer_rope_theta": [0, 500.0, 1e4], "tie_word_embeddings": False},
    ),
    "granite swa, biases": (
        "GraniteSWA",
        TWO | GRANITE | {"sliding_window": 7, "attention_bias": True, "mlp_bias": True, **LLAMA3},
    ),
    "granite moe swa": (
        "GraniteMoeSWA",
        TWO
        | GRANITE
        | {"sliding_window": 9, "num_local_experts": 4, "shared_intermediate_size": 56, "intermediate_size": 40},
    ),
    "gpt2": ("GPT2", TWO | {"n_inner": 80, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2, scores as they are, not tied": (
        "GPT2",
        TWO | {"scale_attn_weights": False, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    "lfm3": (
        "Lfm3",
        {"layer_types": ["conv", "full_attention", "sliding_attention"], "head_dim": 16, "sliding_window": 9},
    ),
    "lfm3, biases, no gates, norms before alone": (
        "Lfm3",
        {"layer_types": ["sliding_attention", "full_attention", "conv"], "head_dim": 12, "sliding_window": 7}
        | {"conv_bias": True, "conv_L_cache": 4, "attention_bias": True, "tie_word_embeddings": False}
        | {"use_sandwich_norm": False, "use_attention_gate": False},
    ),
    "exaone moe": (
        "ExaoneMoe",
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4}
        | {"topk_group": 2, "sliding_window": 9, "sliding_window_pattern": 2, "num_shared_experts": 2},
    ),
    "exaone moe, every layer sees all, not renormalised": (
        "ExaoneMoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False}
        | {"sliding_window": 9, "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse", "dense"], **TWO},
    ),
    "gemma": ("Gemma", TWO | {"head_dim": 20}),
    "gemma, biases, not tied": (
        "Gemma",
        TWO | {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "granite moe": (
        "GraniteMoe",
        TWO | GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    "granite moe with a shared expert": (
        "GraniteMoeShared",
        TWO
        | GRANITE
        | {"num_local_experts": 4, "shared_intermediate_size": 56, "intermediate_size": 40, "attention_bias": True},
    ),
    "minimax m2": (
        "MiniMaxM2",
        TWO
        | rope("default", partial_rotary_factor=0.5)
        | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    "nemotron": ("Nemotron", TWO),
    "nemotron, biases, turned otherwise": (
        "Nemotron",
        TWO
        | rope("default", partial_rotary_factor=0.25)
        | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "hidden_act": "gelu", "norm_eps": 1e-3},
    ),
    "qwen2 moe": (
        "Qwen2Moe",
        {**QWEN_EXPERTS, "norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [1]},
    ),
    "qwen2 moe, some layers sliding, not renormalised": (
        "Qwen2Moe",
        {**QWEN_EXPERTS, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
        | {"decoder_sparse_step": 2},
    ),
    "seed-oss": ("SeedOss", TWO | {"head_dim": 16}),
    "seed-oss, other biases": (
        "SeedOss",
        TWO | {"head_dim": 12, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "starcoder2": ("Starcoder2", TWO),
    "falcon-h1": ("FalconH1", TWO | FALCON_H1),
    "falcon-h1, normalised before the gate, biases": (
        "FalconH1",
        TWO
        | FALCON_H1
        | {"mamba_rms_norm": True, "mamba_d_ssm": None, "mamba_conv_bias": False, "tie_word_embeddings": True}
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
    ),
    "falcon-h1, normalised after the gate": (
        "FalconH1",
        TWO | FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "cwm": ("Cwm", {"bos_token_id": 1, "head_dim": 16, "sliding_window": 9, "layer_types": None}),
    "falcon": ("Falcon", TWO | {"ffn_hidden_size": 80}),
    "falcon, grouped": (
        "Falcon",
        TWO
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 80}
        | {"num_ln_in_parallel_attn": None},
    ),
    "falcon, one after the other, as many keys": (
        "Falcon",
        TWO | {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 80},
    ),
    "gpt bigcode": ("GPTBigCode", TWO | {"n_inner": 80}),
    "gpt bigcode, as many keys": ("GPTBigCode", TWO | {"multi_query": False, "tie_word_embeddings": False}),
    "bloom": ("Bloom", TWO),
    "bloom, heads that are no power of two, not tied": (
        "Bloom",
        TWO | {"num_attention_heads": 6, "tie_word_embeddings": False},
    ),
    "mpt": ("Mpt", TWO | {"attn_config": {"clip_qkv": 0.8}}),
    "mpt, heads that are no power of two, not tied": (
        "Mpt",
        TWO | {"num_attention_heads": 6, "attn_config": {"softmax_scale": 0.2}, "tie_word_embeddings": False},
    ),
    "opt": ("OPT", TWO | {"ffn_dim": 80}),
    "opt, galactica": ("OPT", TWO | {"ffn_dim": 80, "activation_function": "gelu", "enable_bias": False}),
    "gpt-j": ("GPTJ", TWO | {"rotary_dim": 8}),
    "glm": ("Glm", TWO | {"head_dim": 16}),
    "helium": ("Helium", TWO | {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "hunyuan 3": (
        "HYV3",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "attention_bias": True,
        }
        | {"num_shared_experts": 2, "mlp_bias": True, **TWO},
    ),
    "hyperclova x": ("HyperCLOVAX", TWO | GRANITE | {"logits_scaling": 0.3}),
    "jais2": ("Jais2", TWO),
    "ministral": (
        "Ministral",
        TWO | {"head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "jamba": ("Jamba", JAMBA),
    "jamba, biases, no experts": (
        "Jamba",
        JAMBA | TWO | {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 3},
    ),
    "kimi linear": ("KimiLinear", LATENTS | KIMI | {"q_lora_rank": None, "num_local_experts": 6}),
    "kimi linear, ranks of queries, groups, biases": (
        "KimiLinear",
        LATENTS
        | KIMI
        | {"num_local_experts": 6, "n_group": 2, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "olmo": ("Olmo", TWO | {"clip_qkv": 0.3, "attention_bias": True}),
    "solar open": ("SolarOpen", TWO | {**SHARED_EXPERTS, "first_k_dense_replace": None, "head_dim": 16}),
    "stablelm": ("StableLm", TWO | {"use_qkv_bias": True, "num_attention_heads": 2}),
    "stablelm, side by side": (
        "StableLm",
        TWO | rope("default", partial_rotary_factor=0.5) | {"use_parallel_residual": True},
    ),
    "vaultgemma": ("VaultGemma", TWO | {"head_dim": 20, "query_pre_attn_scalar": 13, "sliding_window": 9}),
    "youtu": ("Youtu", TWO | {key: value for key, value in LATENTS.items() if "rank" in key or "head" in key}),
    "starcoder2, no biases, sliding, not tied": (
        "Starcoder2",
        TWO | {"use_bias": False, "sliding_window": 9, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
}

TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_TOWER = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": SHAPE | {"head_dim": 16, "sliding_window": 9},
            "mm_tokens_per_image": 4,
            "vision_config": TOWER | {"image_size": 28, "patch_size": 7},
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": SHAPE | GEMMA4 | {"num_kv_shared_layers": 1, "pad_token_id": 0},
            "vision_config": TOWER | {"head_dim": 8},
            "audio_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "output_proj_dims": 16,
            },
        },
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": SHAPE | LLAMA4,
            "vision_config": TOWER
            | {
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": SHAPE | MINISTRAL | {"head_dim": 16, "model_type": "ministral3"},
            "vision_config": TOWER | {"model_type": "pixtral", "image_size": 28, "patch_size": 7},
        },
    ),
    "mistral4": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": SHAPE | TWO | LATENTS | MINISTRAL_LATENTS | {"model_type": "mistral4"},
            "vision_config": TOWER | {"model_type": "pixtral", "image_size": 28, "patch_size": 7},
        },
    ),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": SHAPE | DELTA, "vision_config": QWEN_TOWER},
    ),
    "qwen3.5 mixture": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": SHAPE | DELTA | QWEN_EXPERTS,
            "vision_config": QWEN_TOWER,
        },
    ),
}
