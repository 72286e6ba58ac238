"""llama.cpp's architectures, and what of each goes to which key of `config.json`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.gguf.gemma4 import read_gemma4
from penstock.gguf.hybrids import read_granite_hybrid, read_lfm2, read_lfm2_moe, read_nemotron_h, read_qwen3_5
from penstock.gguf.keys import NULL, Given
from penstock.gguf.mixtures import (
    read_deepseek2,
    read_experts,
    read_glm4_moe,
    read_gpt_oss,
    read_llama4,
    read_phimoe,
    read_qwen3_moe,
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one of llama.cpp's architectures is in `transformers`, and how its files differ."""

    families: tuple[str, ...]
    """The first, unless the reader says otherwise."""
    interleaved_rope: bool
    """Whether the rows of queries and keys are in the order of interleaved rotary pairs (0 h/2 1 h/2+1 ...)."""
    read: Callable[[Given], dict[str, Any]]
    """What the family has beyond the keys of all; of a key with None the config has nothing."""
    partial_rope: bool = False
    """Whether positions may turn a part of a head."""
    yarn_mscale: bool = False
    """Whether `yarn` may change how much attention sees."""
    sizes_by_layer: bool = False
    """Whether layers may have sizes of their own, 0 where they do not attend, or have no MLP."""
    keys_in_turn: bool = False
    """Whether heads of values of a delta net take those of keys in turn, not neighbours the same one."""


def _read_llama(given: Given) -> dict[str, Any]:
    window = given.keys.find("attention.sliding_window", int)
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
    """Granite's four scales."""
    return {
        "embedding_multiplier": given.keys.find("embedding_scale", float),
        "attention_multiplier": given.keys.need("attention.scale", float),
        "residual_multiplier": given.keys.find("residual_scale", float),
        "logits_scaling": given.keys.find("logit_scale", float),
    }


def _read_biases(given: Given) -> dict[str, Any]:
    return {"attention_bias": given.has("attn_q.bias")}


def _read_olmo2(given: Given) -> dict[str, Any]:
    window = given.keys.find("attention.sliding_window", int)
    if window is None:
        return _read_biases(given)
    given.keys.expect("rope.freq_base_swa", given.config.get("rope_theta", 500000.0))
    return {
        **_read_biases(given),
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": _kinds_of_layers(given),
    }


def _kinds_of_layers(given: Given) -> list[str] | None:
    sliding = given.keys.by_layer("attention.sliding_window_pattern")
    return None if sliding is None else ["sliding_attention" if one else "full_attention" for one in sliding]


def _read_exaone4(given: Given) -> dict[str, Any]:
    window = given.keys.find("attention.sliding_window", int)
    return {"sliding_window": window or NULL, "layer_types": _kinds_of_layers(given)}


def _read_ernie4_5(given: Given) -> dict[str, Any]:
    return {"use_bias": given.has("attn_q.bias")}


def _read_smollm3(given: Given) -> dict[str, Any]:
    return {**_read_biases(given), "mlp_bias": given.has("ffn_gate.bias")}


def _read_gemma(given: Given) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": given.keys.find("attention.sliding_window", int),
        "attention_bias": given.has("attn_q.bias"),
    }


def _read_gemma2(given: Given) -> dict[str, Any]:
    return {
        **_read_gemma(given),
        "query_pre_attn_scalar": _scaled_by(given, 46),
        "attn_logit_softcapping": given.keys.find("attn_logit_softcapping", float),
        "final_logit_softcapping": given.keys.find("final_logit_softcapping", float),
    }


def _read_gemma3(given: Given) -> dict[str, Any]:
    return {
        **_read_gemma(given),
        "query_pre_attn_scalar": _scaled_by(given, 62),
        "final_logit_softcapping": given.keys.find("final_logit_softcapping", float),
        "rope_local_base_freq": given.keys.find("rope.freq_base_swa", float),
        "sliding_window_pattern": given.keys.find("attention.sliding_window_pattern", int),
    }


def _scaled_by(given: Given, layers_of_largest: int) -> int:
    """What scores are divided by the root of: of the largest models, known by their layers, another one."""
    if given.num_layers == layers_of_largest:
        return int(given.config["hidden_size"] // given.config["num_attention_heads"])
    return int(given.config["head_dim"])


def _read_phi3(given: Given) -> dict[str, Any]:
    original = given.keys.find("rope.scaling.original_context_length", int)
    return {
        "sliding_window": given.keys.find("attention.sliding_window", int) or None,  # 0 is none
        "original_max_position_embeddings": original,
    }


def _read_mistral3(given: Given) -> dict[str, Any]:
    scaling = given.config["rope_scaling"]
    stretch = given.keys.find("rope.scaling.yarn_log_multiplier", float)
    beta = given.keys.find("attention.temperature_scale", float)
    if scaling is None or beta is None:
        return {"architectures": ["MistralForCausalLM"]}
    mscale = {} if stretch is None else {"mscale": 1.0, "mscale_all_dim": stretch}
    theta = {"rope_theta": given.config["rope_theta"]}
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {**scaling, **mscale, **theta, "llama_4_scaling_beta": beta},
    }


ARCHITECTURES = {
    "llama": Architecture(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), True, _read_llama),
    "deepseek2": Architecture(
        ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"),
        False,
        read_deepseek2,
        partial_rope=True,
        yarn_mscale=True,
    ),
    "ernie4_5": Architecture(("Ernie4_5ForCausalLM",), False, _read_ernie4_5),
    "exaone4": Architecture(("Exaone4ForCausalLM",), False, _read_exaone4),
    "gemma2": Architecture(("Gemma2ForCausalLM",), False, _read_gemma2),
    "gemma3": Architecture(("Gemma3ForCausalLM",), False, _read_gemma3),
    "gemma4": Architecture(("Gemma4ForCausalLM",), False, read_gemma4, sizes_by_layer=True),
    "glm4": Architecture(("Glm4ForCausalLM",), False, _read_biases, partial_rope=True),
    "glm4moe": Architecture(("Glm4MoeForCausalLM",), False, read_glm4_moe, partial_rope=True),
    "gpt-oss": Architecture(("GptOssForCausalLM",), False, read_gpt_oss),
    "granite": Architecture(("GraniteForCausalLM",), True, _read_granite),
    "granitehybrid": Architecture(
        ("GraniteMoeHybridForCausalLM",),
        True,
        lambda given: {**read_granite_hybrid(given), **read_granite_scales(given)},
        sizes_by_layer=True,
    ),
    "lfm2": Architecture(("Lfm2ForCausalLM",), False, read_lfm2, sizes_by_layer=True),
    "lfm2moe": Architecture(("Lfm2MoeForCausalLM",), False, read_lfm2_moe, sizes_by_layer=True),
    "llama4": Architecture(("Llama4ForCausalLM",), False, read_llama4),
    "mistral3": Architecture(("Ministral3ForCausalLM", "MistralForCausalLM"), True, _read_mistral3, yarn_mscale=True),
    "nemotron_h": Architecture(("NemotronHForCausalLM",), False, read_nemotron_h, sizes_by_layer=True),
    "nemotron_h_moe": Architecture(("NemotronHForCausalLM",), False, read_nemotron_h, sizes_by_layer=True),
    "olmo2": Architecture(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), False, _read_olmo2),
    "olmoe": Architecture(
        ("OlmoeForCausalLM",), False, lambda given: {**_read_biases(given), **read_experts(given.keys)}
    ),
    "phi3": Architecture(("Phi3ForCausalLM",), False, _read_phi3, partial_rope=True),
    "phimoe": Architecture(("PhimoeForCausalLM",), False, read_phimoe),
    "qwen2": Architecture(("Qwen2ForCausalLM",), False, lambda given: {}),
    "qwen3": Architecture(("Qwen3ForCausalLM",), False, _read_biases),
    "qwen3moe": Architecture(("Qwen3MoeForCausalLM",), False, read_qwen3_moe),
    "qwen3next": Architecture(("Qwen3NextForCausalLM",), False, read_qwen3_5, partial_rope=True),
    "qwen35": Architecture(("Qwen3_5ForCausalLM",), False, read_qwen3_5, partial_rope=True, keys_in_turn=True),
    "qwen35moe": Architecture(("Qwen3_5MoeForCausalLM",), False, read_qwen3_5, partial_rope=True, keys_in_turn=True),
    "smollm3": Architecture(("SmolLM3ForCausalLM",), True, _read_smollm3),
}
"""By `general.architecture`. Files of Mistral's models name llama."""
