"""llama.cpp's architectures, and how the metadata of each maps to the keys of `config.json`."""

from collections.abc import Callable
from typing import Any

from penstock.checkpoint.gguf.encoders import (
    read_bert,
    read_gemma_embedding,
    read_jina_bert,
    read_modern_bert,
    read_nomic_bert,
)
from penstock.checkpoint.gguf.gemma import read_gemma1, read_gemma2, read_gemma3
from penstock.checkpoint.gguf.gemma3n import read_gemma3n
from penstock.checkpoint.gguf.gemma4 import read_gemma4
from penstock.checkpoint.gguf.gpt import (
    read_bloom,
    read_falcon,
    read_gpt2,
    read_gpt_bigcode,
    read_gpt_neox,
    read_mpt,
)
from penstock.checkpoint.gguf.hybrids import (
    read_bamba,
    read_falcon_h1,
    read_granite_hybrid,
    read_jamba,
    read_kimi_linear,
    read_lfm2,
    read_lfm2_moe,
    read_nemotron_h,
    read_qwen3_5,
)
from penstock.checkpoint.gguf.keys import NULL, Given, layer_norm_eps
from penstock.checkpoint.gguf.mixtures import (
    read_afmoe,
    read_bailing_moe_v2,
    read_deepseek2,
    read_deepseek32,
    read_dots1,
    read_ernie4_5_moe,
    read_exaone_moe,
    read_experts,
    read_glm4_moe,
    read_glm_dsa,
    read_gpt_oss,
    read_hunyuan_moe,
    read_hy_v3,
    read_llama4,
    read_minimax_m2,
    read_mistral4,
    read_phimoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from penstock.checkpoint.gguf.rope import with_sections
from penstock.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """A llama.cpp architecture: its names in `transformers` and the conventions of its files."""

    families: tuple[str, ...]
    """`architectures` in `config.json`: the first one, unless `read` returns another."""
    interleaved_rope: bool
    """Whether the rows of the query and key matrices are permuted for interleaved RoPE (0 h/2 1 h/2+1 ...)."""
    read: Callable[[Given], dict[str, Any]]
    """Returns the family's own config entries; an entry with the value None is removed from the config."""
    partial_rope: bool = False
    """Whether RoPE may rotate only a part of each head."""
    yarn_mscale: bool = False
    """Whether YaRN may also scale the attention scores (`mscale`)."""
    sizes_by_layer: bool = False
    """Whether sizes may differ by layer; 0 means that the layer has no attention or no MLP."""
    bidirectional: bool = False
    """Whether it is an encoder, in which every token attends to all others."""
    has_factors: bool = False
    """Whether the matrices contain the model's factors, so that adapters made for folders do not fit them."""
    keys_in_turn: bool = False
    """Whether value head i of a delta net uses key head i % key_heads; otherwise adjacent heads share a key head."""


def _read_llama(given: Given) -> dict[str, Any]:
    window = given.keys.find("attention.sliding_window", int) or None
    if experts := read_experts(given.keys):
        return {"architectures": ["MixtralForCausalLM"], "sliding_window": window, **experts}
    if window is not None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {
        "attention_bias": "blk.0.attn_q.bias" in given.tensors or "blk.0.attn_output.bias" in given.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in given.tensors or "blk.0.ffn_down.bias" in given.tensors,
    }


def _read_granite(given: Given) -> dict[str, Any]:
    return {**_read_llama(given), **read_granite_scales(given)}


def read_granite_scales(given: Given) -> dict[str, Any]:
    """Granite's four scaling factors: of embeddings, attention scores, residual branches and logits."""
    return {
        "embedding_multiplier": given.keys.find("embedding_scale", float),
        "attention_multiplier": given.keys.need("attention.scale", float),
        "residual_multiplier": given.keys.find("residual_scale", float),
        "logits_scaling": given.keys.find("logit_scale", float),
    }


def _read_granite_hybrid(given: Given) -> dict[str, Any]:
    if given.keys.find("rope.scaling.finetuned", bool):  # so the converter says that there is RoPE
        return read_bamba(given)
    return {**read_granite_hybrid(given), **read_granite_scales(given)}


def _read_granite_moe(given: Given) -> dict[str, Any]:
    found = {
        **read_experts(given.keys),
        **read_granite_scales(given),
        "attention_bias": given.has("attn_q.bias"),
    }
    shared = given.keys.find("expert_shared_feed_forward_length", int)
    if not shared:
        return found
    return {**found, "architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": shared}


def _read_biases(given: Given) -> dict[str, Any]:
    return {"attention_bias": given.has("attn_q.bias") or given.has("attn_qkv.bias")}


def _read_olmo(given: Given) -> dict[str, Any]:
    clip = given.keys.find("attention.clamp_kqv", float)
    return {**_read_biases(given), "clip_qkv": clip or None, "rms_norm_eps": None}


def _read_stablelm(given: Given) -> dict[str, Any]:
    return {
        **layer_norm_eps(given),
        "use_qkv_bias": given.has("attn_q.bias"),
        "qk_layernorm": given.has("attn_q_norm.weight"),
        "use_parallel_residual": not given.has("ffn_norm.weight"),
    }


def _read_qwen_vl(given: Given) -> dict[str, Any]:
    given.keys.ignore("n_deepstack_layers")  # the mmproj file names them
    return with_sections(given.keys, given.config)


def _read_olmo2(given: Given) -> dict[str, Any]:
    window = given.keys.find("attention.sliding_window", int)
    if window is None:
        return _read_biases(given)
    given.keys.expect("rope.freq_base_swa", given.config["rope_theta"] or 500000.0)
    return {
        **_read_biases(given),
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": _kinds_of_layers(given),
    }


def _kinds_of_layers(given: Given) -> list[str] | None:
    sliding = given.keys.by_layer("attention.sliding_window_pattern")
    return (
        None if sliding is None else ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]
    )


def _read_exaone4(given: Given) -> dict[str, Any]:
    window = given.keys.find("attention.sliding_window", int)
    return {"sliding_window": window or NULL, "layer_types": _kinds_of_layers(given)}


def _read_ernie4_5(given: Given) -> dict[str, Any]:
    return {"use_bias": given.has("attn_q.bias")}


def _read_smollm3(given: Given) -> dict[str, Any]:
    return {**_read_biases(given), "mlp_bias": given.has("ffn_gate.bias")}


def _read_seed_oss(given: Given) -> dict[str, Any]:
    return {
        **_read_biases(given),
        "attention_out_bias": given.has("attn_output.bias"),
        "mlp_bias": given.has("ffn_gate.bias"),
    }


def _read_plain_mlp(given: Given) -> dict[str, Any]:
    return {**_read_biases(given), "mlp_bias": given.has("ffn_up.bias")}


def _read_jais2(given: Given) -> dict[str, Any]:
    return {**_read_plain_mlp(given), **layer_norm_eps(given)}


def _read_apertus(given: Given) -> dict[str, Any]:
    scaling, theta = given.config["rope_scaling"], given.config["rope_theta"]
    if scaling is None:
        scaling = {"rope_type": "default", "rope_theta": theta or 12e6}
    return {**_read_biases(given), "hidden_act": "xielu", "rope_scaling": scaling}


def _read_granite_swa(given: Given) -> dict[str, Any]:
    experts = read_experts(given.keys)
    if experts:
        shared = given.keys.find("expert_shared_feed_forward_length", int) or 0
        experts |= {"architectures": ["GraniteMoeSWAForCausalLM"], "shared_intermediate_size": shared}
    turned = given.keys.by_layer("attention.rope_pattern") or [1] * given.num_layers
    return {
        **_read_biases(given),
        **(experts or {"mlp_bias": given.has("ffn_gate.bias")}),
        **read_granite_scales(given),
        "sliding_window": given.keys.need("attention.sliding_window", int),
        "layer_types": _kinds_of_layers(given),
        "layer_rope_theta": [None if is_turned else 0.0 for is_turned in turned],
    }


def _read_cohere(given: Given) -> dict[str, Any]:
    return {
        **_read_biases(given),
        **layer_norm_eps(given),
        "logit_scale": given.keys.find("logit_scale", float),
        "use_qk_norm": given.has("attn_q_norm.weight") or None,
    }


def _read_cohere2(given: Given) -> dict[str, Any]:
    window = given.keys.find("attention.sliding_window", int)
    return {**_read_cohere(given), "use_qk_norm": None, "sliding_window": window}


def _read_nemotron(given: Given) -> dict[str, Any]:
    return {**_read_plain_mlp(given), "norm_eps": given.config["rms_norm_eps"], "rms_norm_eps": None}


def _read_starcoder2(given: Given) -> dict[str, Any]:
    return {
        "use_bias": given.has("attn_q.bias"),
        "sliding_window": given.keys.find("attention.sliding_window", int),
        "norm_epsilon": given.config["rms_norm_eps"],
        "rms_norm_eps": None,
    }


def _read_phi3(given: Given) -> dict[str, Any]:
    original = given.keys.find("rope.scaling.original_context_length", int)
    return {
        "sliding_window": given.keys.find("attention.sliding_window", int) or None,  # 0: no window
        "original_max_position_embeddings": original,
    }


def _read_mistral3(given: Given) -> dict[str, Any]:
    scaling = given.config["rope_scaling"]
    stretch = given.keys.find("rope.scaling.yarn_log_multiplier", float)
    beta = given.keys.find("attention.temperature_scale", float)
    if scaling is None or beta is None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": NULL}
    mscale = {} if stretch is None else {"mscale": 1.0, "mscale_all_dim": stretch}
    theta = {"rope_theta": given.config["rope_theta"]}
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {**scaling, **mscale, **theta, "llama_4_scaling_beta": beta},
    }


ARCHITECTURES = {
    "bert": Architecture(("BertModel",), False, read_bert, bidirectional=True),
    "gemma-embedding": Architecture(("Gemma3TextModel",), False, read_gemma_embedding, bidirectional=True),
    "nomic-bert": Architecture(("NomicBertModel",), False, read_nomic_bert, bidirectional=True),
    "jina-bert-v2": Architecture(("JinaBertModel",), False, read_jina_bert, bidirectional=True),
    "llama": Architecture(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), True, _read_llama),
    "modern-bert": Architecture(("ModernBertModel",), False, read_modern_bert, bidirectional=True),
    "afmoe": Architecture(("AfmoeForCausalLM",), False, read_afmoe),
    "apertus": Architecture(("ApertusForCausalLM",), False, _read_apertus),
    "arcee": Architecture(("ArceeForCausalLM",), True, _read_plain_mlp),
    "bailingmoe2": Architecture(("BailingMoeV2ForCausalLM",), False, read_bailing_moe_v2, partial_rope=True),
    "bloom": Architecture(("BloomForCausalLM",), False, read_bloom),
    "chatglm": Architecture(("GlmForCausalLM",), False, _read_biases, partial_rope=True),
    "cohere2": Architecture(("Cohere2ForCausalLM",), False, _read_cohere2),
    "command-r": Architecture(("CohereForCausalLM",), False, _read_cohere),
    "deepseek2": Architecture(
        ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
        False,
        read_deepseek2,
        partial_rope=True,
        yarn_mscale=True,
    ),
    "deepseek32": Architecture(
        ("DeepseekV32ForCausalLM",), False, read_deepseek32, partial_rope=True, yarn_mscale=True
    ),
    "dots1": Architecture(("Dots1ForCausalLM",), False, read_dots1),
    "ernie4_5": Architecture(("Ernie4_5ForCausalLM",), False, _read_ernie4_5),
    "ernie4_5-moe": Architecture(("Ernie4_5_MoeForCausalLM",), False, read_ernie4_5_moe),
    "exaone4": Architecture(("Exaone4ForCausalLM",), False, _read_exaone4),
    "exaone-moe": Architecture(
        ("ExaoneMoeForCausalLM",), False, lambda given: {**_read_exaone4(given), **read_exaone_moe(given)}
    ),
    "falcon": Architecture(("FalconForCausalLM",), False, read_falcon),
    "falcon-h1": Architecture(("FalconH1ForCausalLM",), False, read_falcon_h1, has_factors=True),
    "gemma": Architecture(("GemmaForCausalLM",), False, read_gemma1),
    "gemma2": Architecture(("Gemma2ForCausalLM",), False, read_gemma2),
    "gemma3": Architecture(("Gemma3ForCausalLM",), False, read_gemma3),
    "gemma3n": Architecture(("Gemma3nForCausalLM",), False, read_gemma3n, sizes_by_layer=True),
    "gemma4": Architecture(("Gemma4ForCausalLM",), False, read_gemma4, sizes_by_layer=True),
    "glm-dsa": Architecture(("GlmMoeDsaForCausalLM",), False, read_glm_dsa, partial_rope=True, yarn_mscale=True),
    "glm4": Architecture(("Glm4ForCausalLM",), False, _read_biases, partial_rope=True),
    "glm4moe": Architecture(("Glm4MoeForCausalLM", "SolarOpenForCausalLM"), False, read_glm4_moe, partial_rope=True),
    "gpt2": Architecture(("GPT2LMHeadModel",), False, read_gpt2),
    "gptneox": Architecture(("GPTNeoXForCausalLM",), False, read_gpt_neox, partial_rope=True),
    "gpt-oss": Architecture(("GptOssForCausalLM",), False, read_gpt_oss),
    "granite": Architecture(("GraniteForCausalLM",), True, _read_granite),
    "granitehybrid": Architecture(
        ("GraniteMoeHybridForCausalLM", "BambaForCausalLM"),
        True,
        _read_granite_hybrid,
        partial_rope=True,
        sizes_by_layer=True,
    ),
    "granite_swa": Architecture(("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"), True, _read_granite_swa),
    "granitemoe": Architecture(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), True, _read_granite_moe),
    "hunyuan-dense": Architecture(("HunYuanDenseV1ForCausalLM",), False, _read_biases),
    "hunyuan-moe": Architecture(
        ("HunYuanMoEV1ForCausalLM",), False, lambda given: {**_read_biases(given), **read_hunyuan_moe(given)}
    ),
    "hy_v3": Architecture(("HYV3ForCausalLM",), False, read_hy_v3),
    "jais2": Architecture(("Jais2ForCausalLM",), False, _read_jais2),
    "jamba": Architecture(("JambaForCausalLM",), False, read_jamba, sizes_by_layer=True),
    "kimi-linear": Architecture(
        ("KimiLinearForCausalLM",), False, read_kimi_linear, partial_rope=True, sizes_by_layer=True
    ),
    "lfm2": Architecture(("Lfm2ForCausalLM",), False, read_lfm2, sizes_by_layer=True),
    "lfm2moe": Architecture(("Lfm2MoeForCausalLM",), False, read_lfm2_moe, sizes_by_layer=True),
    "llama4": Architecture(("Llama4ForCausalLM",), False, read_llama4),
    "minimax-m2": Architecture(("MiniMaxM2ForCausalLM",), False, read_minimax_m2, partial_rope=True),
    "mistral3": Architecture(("Ministral3ForCausalLM", "MistralForCausalLM"), True, _read_mistral3, yarn_mscale=True),
    "mistral4": Architecture(("Mistral4ForCausalLM",), False, read_mistral4, partial_rope=True, yarn_mscale=True),
    "mpt": Architecture(("MptForCausalLM",), False, read_mpt),
    "nemotron": Architecture(("NemotronForCausalLM",), False, _read_nemotron, partial_rope=True),
    "nemotron_h": Architecture(("NemotronHForCausalLM",), False, read_nemotron_h, sizes_by_layer=True),
    "nemotron_h_moe": Architecture(("NemotronHForCausalLM",), False, read_nemotron_h, sizes_by_layer=True),
    "olmo": Architecture(("OlmoForCausalLM",), True, _read_olmo),
    "olmo2": Architecture(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), False, _read_olmo2),
    "olmoe": Architecture(
        ("OlmoeForCausalLM",), False, lambda given: {**_read_biases(given), **read_experts(given.keys)}
    ),
    "phi2": Architecture(("PhiForCausalLM",), False, layer_norm_eps, partial_rope=True),
    "phi3": Architecture(("Phi3ForCausalLM",), False, _read_phi3, partial_rope=True),
    "phimoe": Architecture(("PhimoeForCausalLM",), False, read_phimoe),
    "qwen2": Architecture(("Qwen2ForCausalLM",), False, lambda given: {}),
    "qwen2moe": Architecture(("Qwen2MoeForCausalLM",), False, read_qwen2_moe),
    "qwen3": Architecture(("Qwen3ForCausalLM",), False, _read_biases),
    "qwen3moe": Architecture(("Qwen3MoeForCausalLM",), False, read_qwen3_moe),
    "qwen2vl": Architecture(("Qwen2ForCausalLM",), False, _read_qwen_vl),
    "qwen3vl": Architecture(
        ("Qwen3ForCausalLM",), False, lambda given: {**_read_biases(given), **_read_qwen_vl(given)}
    ),
    "qwen3vlmoe": Architecture(
        ("Qwen3MoeForCausalLM",), False, lambda given: {**read_qwen3_moe(given), **_read_qwen_vl(given)}
    ),
    "qwen3next": Architecture(("Qwen3NextForCausalLM",), False, read_qwen3_5, partial_rope=True),
    "qwen35": Architecture(("Qwen3_5ForCausalLM",), False, read_qwen3_5, partial_rope=True, keys_in_turn=True),
    "qwen35moe": Architecture(("Qwen3_5MoeForCausalLM",), False, read_qwen3_5, partial_rope=True, keys_in_turn=True),
    "seed_oss": Architecture(("SeedOssForCausalLM",), False, _read_seed_oss),
    "smollm3": Architecture(("SmolLM3ForCausalLM",), True, _read_smollm3),
    "stablelm": Architecture(("StableLmForCausalLM",), False, _read_stablelm, partial_rope=True),
    "starcoder": Architecture(("GPTBigCodeForCausalLM",), False, read_gpt_bigcode),
    "starcoder2": Architecture(("Starcoder2ForCausalLM",), False, _read_starcoder2),
}
"""By `general.architecture`. Files of Mistral models have `llama`."""
