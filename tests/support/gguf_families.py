"""GGUF files of families as llama.cpp's converter writes them, for tests: their keys."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType, RopeScalingType
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file

from tests.support.gguf_files import encode, finish, llama3_factors
from tests.support.gguf_tensors import (
    Config,
    Convert,
    bamba_tensors,
    bloom_tensors,
    converted,
    correction_biases,
    delta_tensors,
    falcon_h1_tensors,
    falcon_tensors,
    gemma3n_tensors,
    gemma4_tensors,
    gpt2_tensors,
    gpt_oss_tensors,
    granite_hybrid_tensors,
    granite_swa_tensors,
    hy_v3_tensors,
    interleaved,
    jamba_tensors,
    kimi_tensors,
    latent_tensors,
    lfm2_tensors,
    llama4_tensors,
    mistral4_tensors,
    nemotron_h_tensors,
    neox_tensors,
    norms_plus_one,
    stacked,
)

Kind = tuple[str, Callable[[GGUFWriter, Config], None], Convert | None]
"""An architecture of llama.cpp, its keys, and how its converter changes tensors."""


def write_family(
    path: Path,
    folder: Path,
    stored: str = "F32",
    metadata: Mapping[str, Any] = {},
    head: str | None = "F32",
    kind: Kind | None = None,
) -> None:
    """Write the checkpoint in `folder`, its matrices as `stored` where the converter does not keep them in F32.

    Args:
        kind: None: that of the folder's architecture in `FAMILIES`.
        head: as `stored`, of the multi-token prediction layer; None leaves its tensors out.
        metadata: other values of keys; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture, add_config, convert = kind or FAMILIES[config["architectures"][0]]
    config = {"num_hidden_layers": len(config.get("layers_block_type") or ()), **config}
    config |= {_OTHER_NAMES[key]: value for key, value in config.items() if key in _OTHER_NAMES}
    writer = GGUFWriter(None, architecture, use_temp_file=False)
    add_common(writer, config)
    add_config(writer, config)
    (key,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == _TABLES.get(architecture, architecture))
    layers = config["num_hidden_layers"]
    names = get_tensor_name_map(key, layers + 1)
    rng = np.random.default_rng(0)
    tensors = {_of_head(name, layers): one for name, one in load_file(folder / "model.safetensors").items()}
    if any("act_fn" in name for name in tensors):
        _add_activations(writer, tensors)
    if any("eh_proj" in name for name in tensors):
        writer.add_block_count(layers + 1)
        writer.add_nextn_predict_layers(1)
    for name, tensor in stacked(converted(iter(tensors.items()), config, convert)):
        gguf_name = _nextn(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        of_head = gguf_name.startswith(f"blk.{layers}.")
        if of_head and head is None:
            continue
        plain = tensor.dim() == 1 or re.search(
            r"ssm_(a|d|conv1d|norm)\b|shortconv\.conv|ffn_gate_inp|bias|altup_.*_coef", gguf_name
        )
        form = GGMLQuantizationType["F32" if plain else head if of_head else stored]
        writer.add_tensor(gguf_name, encode(tensor.float().numpy(), form, rng), raw_dtype=form)
    for name, factors in (_rope(config) or {}).items():
        if name in ("long_factor", "short_factor"):
            writer.add_tensor(f"rope_factors_{name.removesuffix('_factor')}.weight", np.array(factors, np.float32))
    for key, value in metadata.items():
        _replace(writer, key, value)
    finish(writer, path)


_TABLES = {"deepseek32": "glm-dsa", "granite_swa": "granite", "hy_v3": "exaone-moe"}
"""Architectures that this release of `gguf` lacks, with others of the same names."""
_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}
_HEADS = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}


def _of_head(name: str, layers: int) -> str:
    """Qwen's multi-token prediction head with DeepSeek's names: one more layer."""
    stem, _, leaf = name.rpartition(".")
    if stem in _HEADS:
        return f"model.layers.{layers}.{_HEADS[stem]}.{leaf}"
    return name.replace("mtp.layers.0.", f"model.layers.{layers}.")


def _nextn(name: str) -> str | None:
    """A tensor that has the file's name already, or is of the head alone, which the tables of few families have."""
    if name.startswith("blk."):
        return name
    found = re.fullmatch(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm|embed_tokens)\.weight", name)
    return None if found is None else f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}.weight"


def _add_activations(writer: GGUFWriter, tensors: dict[str, torch.Tensor]) -> None:
    """Apertus's xIELU as metadata."""
    of_layers = sorted((int(name.split(".")[2]), name) for name in tensors if "act_fn" in name)
    for kind in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [tensors.pop(name).float().item() for _, name in of_layers if name.endswith(kind)]
        if values:
            writer.add_array(f"xielu.{kind}", values)


def _replace(writer: GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def _rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    found: dict[str, Any] = rope.get("full_attention", rope)
    return found


def add_common(writer: GGUFWriter, config: Config) -> None:
    heads, rope = config["num_attention_heads"], _rope(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config.get("max_position_embeddings") or config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads if writer.arch == "gpt2" else config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if eps := config.get("rms_norm_eps", config.get("norm_eps")):
        writer.add_layer_norm_rms_eps(eps)
    if eps := config.get("layer_norm_epsilon", config.get("norm_epsilon", config.get("layer_norm_eps"))):
        writer.add_layer_norm_eps(eps)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := next(
        (
            config[key]
            for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
            if key in config
        ),
        0,
    ):
        writer.add_expert_count(experts)
        for key in {"num_experts_per_tok", "moe_k"} & config.keys():
            writer.add_expert_used_count(config[key])
    for key, add in {
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "n_shared_experts": writer.add_expert_shared_count,
        "num_shared_experts": writer.add_expert_shared_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "moe_shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }.items():
        if config.get(key) is not None:
            add(config[key])


def add_nothing(writer: GGUFWriter, config: Config) -> None:
    """The keys of all are enough."""


def _add_gemma2(writer: GGUFWriter, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _add_gemma3(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_float32("gemma3.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _add_gemma3n(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())


def _add_gemma4(writer: GGUFWriter, config: Config) -> None:
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    sliding = [kind == "sliding_attention" for kind in kinds]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    seeing_all = next(iter((config.get("per_layer_config") or {}).values()), {})
    size = config["head_dim"]
    wide = seeing_all.get("head_dim", size)
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(size)
    writer.add_value_length_swa(size)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(size)
    ropes = config["rope_parameters"]
    writer.add_float32("gemma4.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    if config["use_double_wide_mlp"]:
        inner, own = config["intermediate_size"], config["num_hidden_layers"] - shared
        writer.add_feed_forward_length([inner if layer < own else 2 * inner for layer in range(own + shared)])
    if "num_key_value_heads" in seeing_all:
        heads = (seeing_all["num_key_value_heads"], config["num_key_value_heads"])
        writer.add_head_count_kv([heads[one] for one in sliding])
    if config.get("enable_moe_block"):
        writer.add_expert_used_count(config["top_k_experts"])
    turning = int(wide * ropes["full_attention"].get("partial_rotary_factor", 0.25) / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (wide // 2 - turning), np.float32))


def _add_phi3(writer: GGUFWriter, config: Config) -> None:
    rope = _rope(config)
    writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 64))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if "long_factor" in rope:
        stretched = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        root = 1 + np.log(stretched) / np.log(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(float(root**0.5))


def _add_gpt_oss(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _add_partial_rope(writer: GGUFWriter, config: Config) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * _rope(config)["partial_rotary_factor"]))


def _add_cohere(writer: GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)


def _add_gpt_neox(writer: GGUFWriter, config: Config) -> None:
    _add_partial_rope(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def _add_sigmoids(writer: GGUFWriter, config: Config) -> None:
    writer.add_uint32(f"{writer.arch}.expert_gating_func", 2)
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _add_exaone_moe(writer: GGUFWriter, config: Config) -> None:
    _add_exaone4(writer, config)
    _add_sigmoids(writer, config)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))


def _add_ernie_moe(writer: GGUFWriter, config: Config) -> None:
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])


def _add_hunyuan_moe(writer: GGUFWriter, config: Config) -> None:
    writer.add_expert_used_count(config["moe_topk"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)


def _add_minimax(writer: GGUFWriter, config: Config) -> None:
    _add_partial_rope(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_uint32(f"{writer.arch}.expert_gating_func", 2)


def _add_granite_moe(writer: GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _add_glm4_moe(writer: GGUFWriter, config: Config) -> None:
    _add_partial_rope(writer, config)
    writer.add_uint32("glm4moe.expert_gating_func", 2)
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _add_solar(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_uint32("glm4moe.expert_gating_func", 2)
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _add_lfm2(writer: GGUFWriter, config: Config) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_uint32(f"{writer.arch}.shortconv.l_cache", config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])
    if writer.arch == "lfm2moe":
        writer.add_uint32("lfm2moe.expert_gating_func", 2)


def _add_delta(writer: GGUFWriter, config: Config) -> None:
    _add_partial_rope(writer, config)
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [kind[0] == "l" for kind in config["layer_types"]])
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_granite_hybrid(writer: GGUFWriter, config: Config) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_rope_scaling_finetuned(False)
    _add_granite_moe(writer, config)
    _add_mamba2(writer, config)


def _add_bamba(writer: GGUFWriter, config: Config) -> None:
    _add_mamba2(writer, config)
    heads, attending = config["num_key_value_heads"], config["attn_layer_indices"]
    writer.add_head_count_kv([heads * (index in attending) for index in range(config["num_hidden_layers"])])
    writer.add_rope_scaling_finetuned(True)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"] // 2)


def _add_mamba2(writer: GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _add_afmoe(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_weights_scale(config["route_scale"])
    writer.add_expert_weights_norm(True)
    writer.add_uint32("afmoe.expert_gating_func", 2)


def _add_falcon(writer: GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)


def _add_mpt(writer: GGUFWriter, config: Config) -> None:
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])


def _add_bigcode(writer: GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(1)


def _add_falcon_h1(writer: GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _add_jamba(writer: GGUFWriter, config: Config) -> None:
    heads, period, offset = (config[key] for key in ("num_key_value_heads", "attn_layer_period", "attn_layer_offset"))
    writer.add_head_count_kv([heads if index % period == offset else 0 for index in range(config["num_hidden_layers"])])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def _add_olmo(writer: GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(1e-5)
    writer.add_clamp_kqv(config["clip_qkv"])


def _add_nemotron_h(writer: GGUFWriter, config: Config) -> None:
    kinds, heads = config["layers_block_type"], config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([config["moe_intermediate_size"] if kind == "moe" else 0 for kind in kinds])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])


def _add_latents(writer: GGUFWriter, config: Config) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if stretch := _rope(config).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * stretch)


def _add_mistral4(writer: GGUFWriter, config: Config) -> None:
    _add_latents(writer, config)
    writer.add_attn_temperature_scale(_rope(config)["llama_4_scaling_beta"])


def _add_kimi(writer: GGUFWriter, config: Config) -> None:
    _add_latents(writer, config)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_uint32("kimi-linear.kda.head_dim", config["linear_head_dim"])
    writer.add_uint32("kimi-linear.expert_gating_func", 2)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))


def _add_hy_v3(writer: GGUFWriter, config: Config) -> None:
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_expert_weights_scale(config["router_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_uint32("hy_v3.expert_gating_func", 2)


def _add_granite_swa(writer: GGUFWriter, config: Config) -> None:
    _add_granite_moe(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    thetas = config["layer_rope_theta"] or [None] * config["num_hidden_layers"]
    writer.add_array("granite_swa.attention.rope_pattern", [theta != 0 for theta in thetas])


def _add_rope_factors(writer: GGUFWriter, config: Config) -> None:
    if _rope(config)["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))


def _add_glm_dsa(writer: GGUFWriter, config: Config) -> None:
    _add_latents(writer, config)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])


def _add_llama4(writer: GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_rope_dimension_count(config["head_dim"])
    if set(config["layer_types"]) == {"full_attention"}:
        writer.add_sliding_window(0)


def _add_ministral3(writer: GGUFWriter, config: Config) -> None:
    writer.add_rope_scaling_yarn_log_mul(_rope(config)["mscale_all_dim"])
    writer.add_attn_temperature_scale(_rope(config)["llama_4_scaling_beta"])
    writer.add_rope_dimension_count(config["head_dim"])


def _add_olmo3(writer: GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_float32("olmo2.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _add_exaone4(writer: GGUFWriter, config: Config) -> None:
    if config["sliding_window"] is not None:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    _add_rope_factors(writer, config)


FAMILIES: dict[str, Kind] = {
    "DeepseekV2ForCausalLM": ("deepseek2", _add_latents, latent_tensors),
    "DeepseekV3ForCausalLM": ("deepseek2", _add_latents, latent_tensors),
    "Glm4MoeLiteForCausalLM": ("deepseek2", _add_latents, latent_tensors),
    "DeepseekV32ForCausalLM": ("deepseek32", _add_glm_dsa, latent_tensors),
    "Mistral4ForCausalLM": ("mistral4", _add_mistral4, mistral4_tensors),
    "YoutuForCausalLM": ("deepseek2", _add_latents, latent_tensors),
    "KimiLinearForCausalLM": ("kimi-linear", _add_kimi, kimi_tensors),
    "BambaForCausalLM": ("granitehybrid", _add_bamba, bamba_tensors),
    "ApertusForCausalLM": ("apertus", _add_rope_factors, None),
    "GlmForCausalLM": ("chatglm", _add_partial_rope, None),
    "GraniteSWAForCausalLM": ("granite_swa", _add_granite_swa, granite_swa_tensors),
    "GraniteMoeSWAForCausalLM": ("granite_swa", _add_granite_swa, granite_swa_tensors),
    "HYV3ForCausalLM": ("hy_v3", _add_hy_v3, hy_v3_tensors),
    "Jais2ForCausalLM": ("jais2", add_nothing, None),
    "SolarOpenForCausalLM": ("glm4moe", _add_solar, correction_biases),
    "ArceeForCausalLM": ("arcee", add_nothing, interleaved),
    "CohereForCausalLM": ("command-r", _add_cohere, None),
    "Cohere2ForCausalLM": ("cohere2", _add_cohere, None),
    "GPTNeoXForCausalLM": ("gptneox", _add_gpt_neox, neox_tensors),
    "GPT2LMHeadModel": ("gpt2", add_nothing, gpt2_tensors),
    "PhiForCausalLM": ("phi2", _add_partial_rope, None),
    "Dots1ForCausalLM": ("dots1", _add_sigmoids, correction_biases),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5-moe", _add_ernie_moe, correction_biases),
    "HunYuanDenseV1ForCausalLM": ("hunyuan-dense", add_nothing, None),
    "HunYuanMoEV1ForCausalLM": ("hunyuan-moe", _add_hunyuan_moe, None),
    "ExaoneMoeForCausalLM": ("exaone-moe", _add_exaone_moe, correction_biases),
    "GemmaForCausalLM": ("gemma", add_nothing, norms_plus_one),
    "GraniteMoeForCausalLM": ("granitemoe", _add_granite_moe, granite_hybrid_tensors),
    "GraniteMoeSharedForCausalLM": ("granitemoe", _add_granite_moe, granite_hybrid_tensors),
    "MiniMaxM2ForCausalLM": ("minimax-m2", _add_minimax, correction_biases),
    "NemotronForCausalLM": ("nemotron", _add_partial_rope, norms_plus_one),
    "Qwen2MoeForCausalLM": ("qwen2moe", add_nothing, None),
    "SeedOssForCausalLM": ("seed_oss", add_nothing, None),
    "Starcoder2ForCausalLM": ("starcoder2", add_nothing, None),
    "Ernie4_5ForCausalLM": ("ernie4_5", add_nothing, None),
    "Exaone4ForCausalLM": ("exaone4", _add_exaone4, None),
    "Gemma2ForCausalLM": ("gemma2", _add_gemma2, norms_plus_one),
    "Gemma3ForCausalLM": ("gemma3", _add_gemma3, norms_plus_one),
    "Gemma3nForCausalLM": ("gemma3n", _add_gemma3n, gemma3n_tensors),
    "Gemma4ForCausalLM": ("gemma4", _add_gemma4, gemma4_tensors),
    "GlmMoeDsaForCausalLM": ("glm-dsa", _add_glm_dsa, latent_tensors),
    "Glm4ForCausalLM": ("glm4", _add_partial_rope, None),
    "Glm4MoeForCausalLM": ("glm4moe", _add_glm4_moe, correction_biases),
    "GptOssForCausalLM": ("gpt-oss", _add_gpt_oss, gpt_oss_tensors),
    "GraniteMoeHybridForCausalLM": ("granitehybrid", _add_granite_hybrid, granite_hybrid_tensors),
    "AfmoeForCausalLM": ("afmoe", _add_afmoe, correction_biases),
    "FalconForCausalLM": ("falcon", _add_falcon, falcon_tensors),
    "BloomForCausalLM": ("bloom", add_nothing, bloom_tensors),
    "MptForCausalLM": ("mpt", _add_mpt, None),
    "GPTBigCodeForCausalLM": ("starcoder", _add_bigcode, None),
    "FalconH1ForCausalLM": ("falcon-h1", _add_falcon_h1, falcon_h1_tensors),
    "OlmoForCausalLM": ("olmo", _add_olmo, interleaved),
    "StableLmForCausalLM": ("stablelm", _add_partial_rope, None),
    "JambaForCausalLM": ("jamba", _add_jamba, jamba_tensors),
    "Lfm2ForCausalLM": ("lfm2", _add_lfm2, lfm2_tensors),
    "Llama4ForCausalLM": ("llama4", _add_llama4, llama4_tensors),
    "PhimoeForCausalLM": ("phimoe", _add_phi3, None),
    "Lfm2MoeForCausalLM": ("lfm2moe", _add_lfm2, lfm2_tensors),
    "Ministral3ForCausalLM": ("mistral3", _add_ministral3, interleaved),
    "NemotronHForCausalLM": ("nemotron_h_moe", _add_nemotron_h, nemotron_h_tensors),
    "Olmo3ForCausalLM": ("olmo2", _add_olmo3, None),
    "OlmoeForCausalLM": ("olmoe", add_nothing, None),
    "Phi3ForCausalLM": ("phi3", _add_phi3, None),
    "Qwen3NextForCausalLM": ("qwen3next", _add_delta, delta_tensors),
    "Qwen3_5ForCausalLM": ("qwen35", _add_delta, delta_tensors),
    "Qwen3_5MoeForCausalLM": ("qwen35moe", _add_delta, delta_tensors),
}
"""By the folder's architecture: llama.cpp's name, the function that adds its keys, its conversion of tensors."""
