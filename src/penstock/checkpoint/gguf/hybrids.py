"""Converts the metadata of models with recurrent layers; a layer's tensors tell whether it has attention."""

from typing import Any

from penstock.checkpoint.gguf.keys import NULL, Given
from penstock.checkpoint.gguf.mixtures import read_experts, read_sigmoid_experts
from penstock.checkpoint.gguf.rope import with_sections
from penstock.errors import CheckpointError


def read_lfm2(given: Given) -> dict[str, Any]:
    """LFM2; the file holds the MLP size after LFM2's adjustment."""
    return {
        "layer_types": _layer_types(given, "conv"),
        "conv_L_cache": given.keys.need("shortconv.l_cache", int),
        "conv_bias": given.has("shortconv.conv.bias"),
        "norm_eps": given.config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def read_lfm2_moe(given: Given) -> dict[str, Any]:
    """LFM2's mixtures of experts."""
    experts = read_experts(given.keys)
    given.keys.expect("expert_gating_func", 2)
    return {
        **read_lfm2(given),
        "block_auto_adjust_ff_dim": None,
        "num_experts": experts.get("num_local_experts"),
        "num_experts_per_tok": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": given.keys.find("expert_feed_forward_length", int),
        "num_dense_layers": given.keys.find("leading_dense_block_count", int),
        "routed_scaling_factor": given.keys.find("expert_weights_scale", float),
        "use_expert_bias": given.has("exp_probs_b.bias"),
    }


def read_qwen3_5(given: Given) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5."""
    keys, experts = given.keys, read_experts(given.keys)
    keys.ignore("full_attention_interval", "attention.recurrent_layers")
    heads = keys.need("ssm.time_step_rank", int)
    inner = keys.need("ssm.inner_size", int)
    if heads < 1 or inner % heads:
        raise keys.unsupported("ssm.inner_size", inner, f"it must be a multiple of ssm.time_step_rank {heads}")
    sizes = {
        **with_sections(keys, given.config),
        "linear_num_key_heads": keys.need("ssm.group_count", int),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.need("ssm.state_size", int),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel", int),
        "layer_types": _layer_types(given, "linear_attention"),
        "attention_bias": given.has("attn_q.bias"),
    }
    is_next = given.config["architectures"] == ["Qwen3NextForCausalLM"]
    sizes["num_nextn_predict_layers" if is_next else "mtp_num_hidden_layers"] = int(given.has_mtp_head)
    if not experts:
        return sizes
    return {
        **sizes,
        "num_experts": experts["num_local_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": keys.find("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": keys.find("expert_shared_feed_forward_length", int),
    }


def read_granite_hybrid(given: Given) -> dict[str, Any]:
    """Granite 4 hybrids, without their scaling factors; they have no RoPE."""
    keys, hidden = given.keys, given.config["hidden_size"]
    inner = keys.need("ssm.inner_size", int)
    if hidden < 1 or inner % hidden:
        raise keys.unsupported("ssm.inner_size", inner, f"it must be a multiple of embedding_length {hidden}")
    experts = read_experts(keys)
    return {
        **(experts or {"num_local_experts": 0}),
        "shared_intermediate_size": keys.find("expert_shared_feed_forward_length", int)
        or given.config["intermediate_size"],
        "layer_types": _layer_types(given, "linear_attention"),
        "attention_bias": given.has("attn_q.bias"),
        **_mamba2(given),
        "mamba_expand": inner // hidden,
        "position_embedding_type": "nope",
        **dict.fromkeys(("rope_theta", "partial_rotary_factor")),
    }


def read_bamba(given: Given) -> dict[str, Any]:
    """Bamba, whose files are as those of Granite 4 hybrids; it always turns half of each head."""
    hidden, inner = given.config["hidden_size"], given.keys.need("ssm.inner_size", int)
    if hidden < 1 or inner % hidden:
        raise given.keys.unsupported("ssm.inner_size", inner, f"it must be a multiple of embedding_length {hidden}")
    given.keys.expect("expert_count", 0)
    return {
        **_mamba2(given),
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [index for index, attends in enumerate(given.layers_with("attn_k.weight")) if attends],
        "attention_bias": given.has("attn_q.bias"),
        "mlp_bias": given.has("ffn_gate.bias"),
        "mamba_expand": inner // hidden,
        "partial_rotary_factor": None,
    }


def read_falcon_h1(given: Given) -> dict[str, Any]:
    """Falcon-H1; the matrices contain its factors."""
    return {
        **_mamba2(given),
        "attention_bias": given.has("attn_q.bias"),
        "projectors_bias": given.has("ssm_out.bias"),
        "mamba_d_ssm": given.keys.need("ssm.inner_size", int),
        "mamba_rms_norm": given.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _mamba2(given: Given) -> dict[str, Any]:
    keys = given.keys
    return {
        "mamba_n_heads": keys.need("ssm.time_step_rank", int),
        "mamba_n_groups": keys.need("ssm.group_count", int),
        "mamba_d_state": keys.need("ssm.state_size", int),
        "mamba_d_conv": keys.need("ssm.conv_kernel", int),
        "mamba_conv_bias": given.has("ssm_conv1d.bias"),
        "mamba_proj_bias": given.has("ssm_in.bias"),
    }


def read_jamba(given: Given) -> dict[str, Any]:
    """Jamba; a layer's tensors tell its parts."""
    keys, experts, hidden = given.keys, read_experts(given.keys), given.config["hidden_size"]
    inner = keys.need("ssm.inner_size", int)
    if hidden < 1 or inner % hidden:
        raise keys.unsupported("ssm.inner_size", inner, f"it must be a multiple of embedding_length {hidden}")
    sparse = given.layers_with("ffn_gate_inp.weight")
    return {
        "num_experts": experts.get("num_local_experts", 1),
        "num_experts_per_tok": experts.get("num_experts_per_tok"),
        "layer_types": _layer_types(given, "linear_attention"),
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
        "mamba_d_state": keys.need("ssm.state_size", int),
        "mamba_d_conv": keys.need("ssm.conv_kernel", int),
        "mamba_dt_rank": keys.need("ssm.time_step_rank", int),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": given.has("ssm_conv1d.bias"),
        "mamba_proj_bias": given.has("ssm_in.bias"),
        "rope_theta": None,
    }


def read_nemotron_h(given: Given) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3, whose layers have one part each."""
    keys, experts = given.keys, read_experts(given.keys)
    heads, inner = keys.need("ssm.time_step_rank", int), keys.need("ssm.inner_size", int)
    if heads < 1 or inner % heads:
        raise keys.unsupported("ssm.inner_size", inner, f"it must be a multiple of ssm.time_step_rank {heads}")
    layers = [_kind_of_part(given, index) for index in range(given.num_layers)]
    sizes = {
        "layers_block_type": layers,
        "intermediate_size": _mlp_size(given, layers),
        "layer_norm_epsilon": given.config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": keys.need("ssm.group_count", int),
        "ssm_state_size": keys.need("ssm.state_size", int),
        "conv_kernel": keys.need("ssm.conv_kernel", int),
        "use_conv_bias": given.has("ssm_conv1d.bias"),
        "use_bias": given.has("ssm_in.bias"),
        "mlp_bias": given.has("ffn_up.bias") or given.has("ffn_up_shexp.bias"),
        "rope_theta": None,
        "rms_norm_eps": None,
    }
    if not experts:
        return sizes
    keys.ignore("expert_shared_count")
    return {
        **sizes,
        "n_routed_experts": experts["num_local_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": keys.find("expert_feed_forward_length", int),
        "moe_shared_expert_intermediate_size": keys.find("expert_shared_feed_forward_length", int),
        "moe_latent_size": keys.find("moe_latent_size", int),
        "norm_topk_prob": keys.find("expert_weights_norm", bool),
        "routed_scaling_factor": keys.find("expert_weights_scale", float),
        "n_group": keys.find("expert_group_count", int),
        "topk_group": keys.find("expert_group_used_count", int),
    }


def read_kimi_linear(given: Given) -> dict[str, Any]:
    """Kimi Linear: delta attention, and DeepSeek's latent attention without RoPE."""
    keys, experts = given.keys, read_sigmoid_experts(given)
    keys.expect("expert_gating_func", 2)
    attending = given.layers_with("attn_kv_a_mqa.weight")
    layers = {
        "full_attn_layers": [index for index, attends in enumerate(attending, start=1) if attends],
        "kda_layers": [index for index, attends in enumerate(attending, start=1) if not attends],
    }
    heads, shared = given.config["num_attention_heads"], keys.need("rope.dimension_count", int)
    keys.ignore("attention.key_length", "attention.value_length")
    return {
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": keys.need("kda.head_dim", int),
            "short_conv_kernel_size": keys.need("ssm.conv_kernel", int),
            **layers,
        },
        **dict.fromkeys(("head_dim", "partial_rotary_factor", "rope_theta", "rope_scaling")),
        "mla_use_nope": True,
        "num_key_value_heads": heads,
        "kv_lora_rank": keys.need("attention.kv_lora_rank", int),
        "q_lora_rank": keys.find("attention.q_lora_rank", int) or NULL,
        "qk_rope_head_dim": shared,
        "qk_nope_head_dim": keys.need("attention.key_length_mla", int) - shared,
        "v_head_dim": keys.need("attention.value_length_mla", int),
        "attention_bias": given.has("attn_kv_a_mqa.bias"),
        "num_experts": experts["n_routed_experts"],
        "num_experts_per_token": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "num_shared_experts": experts["n_shared_experts"],
        "first_k_dense_replace": experts["first_k_dense_replace"],
        "routed_scaling_factor": experts["routed_scaling_factor"],
        "moe_renormalize": True if experts["norm_topk_prob"] is None else experts["norm_topk_prob"],
        "num_expert_group": experts["n_group"],
        "topk_group": experts["topk_group"],
    }


_KINDS_OF_PART = {
    "ffn_gate_inp.weight": "moe",
    "attn_q.weight": "full_attention",
    "ssm_in.weight": "linear_attention",
    "ffn_up.weight": "mlp",
}


def _kind_of_part(given: Given, index: int) -> str:
    for tensor, kind in _KINDS_OF_PART.items():
        if f"blk.{index}.{tensor}" in given.tensors:
            return kind
    raise CheckpointError(
        f"{given.keys.file} lacks a tensor of block {index} that tells its kind: one of {', '.join(_KINDS_OF_PART)}"
    )


def _mlp_size(given: Given, layers: list[str]) -> int | None:
    """The MLP layers' inner size, from their tensors: in files with experts the metadata holds another size."""
    return given.tensors[f"blk.{layers.index('mlp')}.ffn_up.weight"].shape[0] if "mlp" in layers else None


def _layer_types(given: Given, recurrent: str) -> list[str]:
    return ["full_attention" if attends else recurrent for attends in given.layers_with("attn_k.weight")]
