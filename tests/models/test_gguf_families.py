"""Families whose tensors llama.cpp's converter changes, from GGUF files: the logits of their folders.

`tests/support/gguf_families.py` writes as that converter does; its own files, and llama.cpp's logits of them, were
compared, but for Llama 4, Phi-3.5-MoE, Gemma 4 and the families of `UNCOMPARED`. Of most of the latter, files that the
converter wrote of these checkpoints gave the logits of `transformers`; it cannot convert those of Cohere 2, GPT-2,
GPT-NeoX, Falcon, Hunyuan's mixture, MiniMax, Phi and StarCoder, which lack keys of the models' own configs.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.gguf.architectures import ARCHITECTURES
from penstock.errors import AdapterError, CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.models.registry import read_facts, read_spec
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_random
from tests.support.families import CASES as FAMILY_CASES
from tests.support.families import (
    DELTA,
    FALCON_H1,
    GEMMA4,
    GRANITE,
    INDEXER,
    JAMBA,
    LATENTS,
    LFM2_MOE,
    LLAMA3,
    LLAMA4,
    LONGROPE,
    LOUD,
    MAMBA,
    MINISTRAL,
    NEMOTRON,
    QWEN_EXPERTS,
    SHAPE,
    SHARED_EXPERTS,
    TWO,
    class_name,
    rope,
)
from tests.support.gguf_families import FAMILIES, write_family
from tests.support.gguf_files import ARCHITECTURES as PLAIN
from tests.support.gguf_tensors import Config, Tensors
from tests.support.reference import expected, referee, texts
from tests.support.stepping import Stepper, settings_for

GLM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "use_qk_norm": True,
}
GPT_OSS: dict[str, Any] = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}
OF_FOUR = TWO | {"intermediate_size": 192}
"""Of families whose MLPs are four times as wide as the hidden states."""
UNCOMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", TWO),
    "apertus, turned otherwise": ("Apertus", TWO | rope("default") | {"attention_bias": True}),
    "bloom": ("Bloom", OF_FOUR | {"num_key_value_heads": 4}),
    "mpt": ("Mpt", OF_FOUR | {"num_key_value_heads": 4, "attn_config": {"clip_qkv": 0.8, "alibi_bias_max": 8}}),
    "arcee": ("Arcee", TWO | {"mlp_bias": True}),
    "bamba": FAMILY_CASES["bamba"],
    "deepseek v3.2": FAMILY_CASES["deepseek v3.2"],
    "glm": FAMILY_CASES["glm"],
    "granite swa": (
        "GraniteSWA",
        GRANITE | {"sliding_window": 9, "layer_rope_theta": [0, 1e4, 1e4], "tie_word_embeddings": False},
    ),
    "granite moe swa": FAMILY_CASES["granite moe swa"],
    "hunyuan 3": ("HYV3", FAMILY_CASES["hunyuan 3"][1] | {"mlp_bias": False}),
    "jais2": FAMILY_CASES["jais2"],
    "kimi linear": FAMILY_CASES["kimi linear"],
    "mistral4": FAMILY_CASES["mistral4"],
    "solar open": FAMILY_CASES["solar open"],
    "youtu": FAMILY_CASES["youtu"],
    "dots1": (
        "Dots1",
        TWO | SHARED_EXPERTS | {"norm_topk_prob": True, "sliding_window": None, "routed_scaling_factor": 1.5},
    ),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "use_bias": True, "moe_layer_end_index": 1},
    ),
    "hunyuan": ("HunYuanDenseV1", TWO | {"head_dim": 16}),
    "hunyuan moe": (
        "HunYuanMoEV1",
        TWO | {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "intermediate_size": 40},
    ),
    "cohere": ("Cohere", TWO | {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": ("Cohere2", {"sliding_window": 9, "num_hidden_layers": 4}),
    "gpt-neox": ("GPTNeoX", TWO | {"num_attention_heads": 2}),
    "gpt2": ("GPT2", TWO | {"n_inner": 80}),
    "glm 5": ("GlmMoeDsa", LATENTS | INDEXER | {"first_k_dense_replace": 1}),
    "phi": ("Phi", TWO),
    "exaone moe": (
        "ExaoneMoe",
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "sliding_window": 9}
        | {"num_shared_experts": 2, "sliding_window_pattern": 2, **LLAMA3},
    ),
    "gemma": ("Gemma", TWO | {"head_dim": 20, "num_key_value_heads": 1}),
    "granite moe": (
        "GraniteMoe",
        TWO | GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    "granite moe with a shared expert": (
        "GraniteMoeShared",
        TWO | GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 56, "intermediate_size": 40},
    ),
    "minimax m2": (
        "MiniMaxM2",
        TWO
        | rope("default", partial_rotary_factor=0.5)
        | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40},
    ),
    "nemotron": ("Nemotron", TWO | {"mlp_bias": True}),
    "qwen2 moe": ("Qwen2Moe", TWO | QWEN_EXPERTS),
    "seed-oss": ("SeedOss", TWO | {"head_dim": 16, "attention_out_bias": True}),
    "starcoder2": ("Starcoder2", TWO),
    "afmoe": (
        "Afmoe",
        FAMILY_CASES["afmoe"][1] | {"num_hidden_layers": 4, "global_attn_every_n_layers": 4, "num_dense_layers": 2},
    ),
    "falcon": FAMILY_CASES["falcon"],
    "falcon, grouped": FAMILY_CASES["falcon, grouped"],
    "gpt bigcode": ("GPTBigCode", TWO | {"n_inner": 80}),
    "falcon-h1": ("FalconH1", TWO | FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "jamba": ("Jamba", JAMBA),
    "olmo": ("Olmo", TWO | {"clip_qkv": 0.3}),
    "stablelm": ("StableLm", TWO | rope("default", partial_rotary_factor=0.5) | {"use_qkv_bias": True}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **UNCOMPARED,
    "deepseek v2": ("DeepseekV2", LATENTS | {"q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "greedy"}),
    "deepseek v2, groups, yarn, biases": (
        "DeepseekV2",
        LATENTS
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7)
        | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "attention_bias": True},
    ),
    "deepseek v3": ("DeepseekV3", LATENTS | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
    "glm 4 moe lite": ("Glm4MoeLite", LATENTS | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 20, "tie_word_embeddings": True}),
    "ernie 4.5, biases": ("Ernie4_5", {"head_dim": 12, "use_bias": True, "tie_word_embeddings": False}),
    "exaone 4": ("Exaone4", {"sliding_window": 9, "num_hidden_layers": 5, **LLAMA3}),
    "exaone 4, nothing slides": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "gemma2": ("Gemma2", {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 9, **LOUD}),
    "gemma3n": FAMILY_CASES["gemma3n"],
    "gemma3": (
        "Gemma3",
        {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 9, "num_hidden_layers": 7},
    ),
    "gemma4": ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 0, "layer_types": None, "num_hidden_layers": 7}),
    "gemma4, per-layer embeddings, shared keys": (
        "Gemma4",
        GEMMA4
        | {"num_kv_shared_layers": 3, "num_hidden_layers": 7, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
    ),
    "gemma4, shared keys, biases, not tied": (
        "Gemma4",
        GEMMA4
        | {"num_kv_shared_layers": 1, "attention_bias": True, "tie_word_embeddings": False}
        | {"final_logit_softcapping": 2.5, "vocab_size_per_layer_input": 170},
    ),
    "gemma4 mixture, values are keys": (
        "Gemma4",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4 moe": ("Glm4Moe", {"head_dim": 16, **GLM_EXPERTS}),
    "gpt-oss": (
        "GptOss",
        GPT_OSS | rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    ),
    "gpt-oss, not stretched": ("GptOss", GPT_OSS | rope("default")),
    "granite hybrid": ("GraniteMoeHybrid", {**MAMBA, "tie_word_embeddings": True, "mamba_n_groups": 2}),
    "granite hybrid, experts": (
        "GraniteMoeHybrid",
        {**MAMBA, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "attention_bias": True},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "lfm2 moe": ("Lfm2Moe", LFM2_MOE),
    "llama4": (
        "Llama4",
        {**LLAMA4, "attn_scale": 0.1, "attention_chunk_size": 8192, "floor_scale": 8192, "num_hidden_layers": 5}
        | {"num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
    ),
    "llama4, every layer sees all": (
        "Llama4",
        {**LLAMA4, "layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 1, 1], "num_experts_per_tok": 1},
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True}),
    "ministral3": ("Ministral3", {"head_dim": 16, **MINISTRAL}),
    "nemotron-h": ("NemotronH", {**NEMOTRON, "use_bias": False, "mlp_bias": False}),
    "nemotron-h, latent experts": (
        "NemotronH",
        {**NEMOTRON, "use_bias": False, "mlp_bias": False, "moe_latent_size": 20, "use_conv_bias": False},
    ),
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 5}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "phi3": ("Phi3", rope("default", partial_rotary_factor=0.5)),
    "phi3, longrope": ("Phi3", LONGROPE | {"original_max_position_embeddings": 64}),
    "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5 mixture": (
        "Qwen3_5Moe",
        {**DELTA, **QWEN_EXPERTS},
    ),
    "qwen3-next": ("Qwen3Next", {**DELTA, **QWEN_EXPERTS}),
}


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.replace(" ", "_"))
def test_logits_from_a_file_are_those_of_transformers(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    family, changes = CASES[name]
    reference = referee(write_random(tmp_path / "hf", family, **(SHAPE | changes)))
    write_family(tmp_path / "model.gguf", tmp_path / "hf")
    (text,) = texts((97,))
    logits = Stepper(tmp_path / "model.gguf", 1, kv_cache_memory="16MiB").step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)
    assert "settings are unknown" not in caplog.text


def test_queries_keys_and_values_may_be_one_matrix(tmp_path: Path) -> None:
    """As in files made of GLM-4's own checkpoints, or by llama.cpp's --fuse-qkv."""
    reference = referee(write_random(tmp_path / "hf", "Glm", **(SHAPE | FAMILY_CASES["glm"][1])))
    parts: dict[str, dict[str, torch.Tensor]] = {}

    def fused(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
        found = re.fullmatch(r"(.*self_attn\.)([qkv])_proj(\..*)", name)
        if found is None:
            yield name, tensor
            return
        of_layer = parts.setdefault(found[1] + found[3], {})
        of_layer[found[2]] = tensor
        if len(of_layer) == 3:
            yield f"{found[1]}qkv_proj{found[3]}", torch.cat([of_layer[part] for part in "qkv"])

    architecture, add_config, _ = FAMILIES["GlmForCausalLM"]
    write_family(tmp_path / "model.gguf", tmp_path / "hf", kind=(architecture, add_config, fused))
    (text,) = texts((97,))
    logits = Stepper(tmp_path / "model.gguf", 1, kv_cache_memory="16MiB").step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference, text), atol=2e-4, rtol=0)


@pytest.mark.parametrize(("name", "target"), [("gpt-neox", "query_key_value"), ("falcon-h1", "q_proj")])
def test_adapters_of_folders_are_refused_where_a_file_has_other_matrices(
    tmp_path: Path, name: str, target: str
) -> None:
    family, changes = CASES[name]
    write_random(tmp_path / "hf", family, **(SHAPE | changes))
    write_family(tmp_path / "model.gguf", tmp_path / "hf")
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "hf", targets=(target,))
    with pytest.raises(AdapterError, match=rf"adds to .*{target}, which"):
        LLM(str(tmp_path / "model.gguf"), adapter=f"a={adapter}", threads=1, packed_cache="off")


def test_each_architecture_that_is_read_is_held_to_transformers() -> None:
    tested = {FAMILIES[class_name(family)][0] for family, _ in CASES.values()} | set(PLAIN.values())
    elsewhere = {"bailingmoe2", "qwen2vl", "qwen3vl", "qwen3vlmoe"}  # test_bailing_moe_v2.py, test_gguf_vision.py
    elsewhere |= {"bert", "gemma-embedding", "jina-bert-v2", "modern-bert", "nomic-bert"}  # test_gguf_encoders.py
    assert set(ARCHITECTURES) - tested - elsewhere == {"nemotron_h"}  # which is the other, without experts


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", [True, False], "it must have one entry for each of the 4 layers"),
        ("attention.sliding_window_pattern", None, "it must have one entry for each of the 4 layers"),
        ("attention.value_length_swa", 20, "only 12 is"),
        ("rope.dimension_count_swa", 6, "only 12 is"),
        ("feed_forward_length", [80, 80, 160, 80], "one size, doubled in layers that share keys, is"),
    ],
)
def test_a_gemma4_file_of_other_sizes_is_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    write_random(tmp_path / "hf", "Gemma4", **(SHAPE | GEMMA4 | {"num_kv_shared_layers": 1}))
    write_family(tmp_path / "model.gguf", tmp_path / "hf", metadata={f"gemma4.{key}": value})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_heads_of_latents_of_another_shape_are_refused(tmp_path: Path) -> None:
    file, name = tmp_path / "model.gguf", b"blk.0.attn_k_b.weight"
    write_random(tmp_path / "hf", "DeepseekV2", **(SHAPE | CASES["deepseek v2"][1]))
    write_family(file, tmp_path / "hf")
    content = file.read_bytes()
    sizes = content.index(name) + len(name) + 4  # after the number of dimensions
    swapped = content[sizes + 8 : sizes + 16] + content[sizes : sizes + 8]
    file.write_bytes(content[:sizes] + swapped + content[sizes + 16 :])
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k_b\.weight in .* has the shape .* config requires \["):
        Stepper(file, 1)


def test_a_layer_without_a_tensor_that_tells_its_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_random(tmp_path / "hf", "NemotronH", **(SHAPE | CASES["nemotron-h"][1]))
    write_family(file, tmp_path / "hf")
    file.write_bytes(file.read_bytes().replace(b"blk.0.ssm_in.weight", b"blk.0.ssm_xx.weight"))
    with pytest.raises(CheckpointError, match=r"block 0 that tells its kind: one of .*ssm_in\.weight"):
        open_checkpoint(str(file))


def test_a_mistral3_file_without_temperatures_has_no_window(tmp_path: Path) -> None:
    write_random(tmp_path / "hf", "Ministral3", **SHAPE, head_dim=16, **MINISTRAL)
    file = tmp_path / "model.gguf"
    write_family(file, tmp_path / "hf", metadata={"mistral3.attention.temperature_scale": None})
    spec = read_spec(open_checkpoint(str(file)))
    assert [mixer.window for mixer in spec.mixers if isinstance(mixer, AttentionSpec)] == [None] * len(spec.layers)


def test_an_olmo3_file_without_a_rope_base_has_the_familys(tmp_path: Path) -> None:
    write_random(tmp_path / "hf", "Olmo3", **(SHAPE | CASES["olmo3"][1]))
    write_family(tmp_path / "model.gguf", tmp_path / "hf", metadata={"olmo2.rope.freq_base": None})
    spec = read_spec(open_checkpoint(str(tmp_path / "model.gguf")))
    assert {rope.theta for rope in spec.ropes} == {500000.0}


DELTA_IN_TWO: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9}),
    "deepseek v3": (
        "DeepseekV3",
        {**LATENTS, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 1}
        | {"topk_group": 1},
    ),
    "gemma3n": (
        "Gemma3n",
        {**FAMILY_CASES["gemma3n"][1], "head_dim": 32, "hidden_size_per_layer_input": 32, "laurel_rank": 32}
        | {"intermediate_size": [64, 96, 96, 64, 96]},
    ),
    "gemma4, per-layer embeddings": (
        "Gemma4",
        {**GEMMA4, "head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    "gemma4, experts": (
        "Gemma4",
        {**GEMMA4, "head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "layer_types": None}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "qwen3.5": (
        "Qwen3_5",
        {**DELTA, "linear_value_head_dim": 16, **DELTA_IN_TWO},
    ),
    "gpt-oss": ("GptOss", GPT_OSS | rope("default")),
    "nemotron-h": (
        "NemotronH",
        {**NEMOTRON, "use_bias": False, "mlp_bias": False, "mamba_num_heads": 4, "mamba_head_dim": 16}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
    ),
}


@pytest.mark.parametrize("form", ["file", "folder"])
def test_activations_beyond_the_range_of_float16_weights_are_computed(tmp_path: Path, form: str) -> None:
    reference = write_random(tmp_path, "Gemma3", **SHAPE, head_dim=12, query_pre_attn_scalar=12, dtype="float16")
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.post_feedforward_layernorm.weight.fill_(30000.0)
    reference.half().save_pretrained(tmp_path)
    write_family(tmp_path / "model.gguf", tmp_path, "F16")
    path = tmp_path / "model.gguf" if form == "file" else tmp_path
    assert settings_for(path)[1].float16_weights
    (text,) = texts((40,))
    logits = Stepper(path, 1, kv_cache_dtype="float32").step({0: text})[0]
    torch.testing.assert_close(logits, expected(reference.float(), text), atol=1e-2, rtol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_matrices_are_read_in_the_types_that_files_have(tmp_path: Path, name: str, kind: str) -> None:
    family, changes = QUANTIZED[name]
    write_random(tmp_path / "hf", family, **(SHAPE | WIDE | changes))
    for each in ("F32", kind):
        write_family(tmp_path / f"{each}.gguf", tmp_path / "hf", each)
    checkpoint, settings = settings_for(tmp_path / f"{kind}.gguf")
    assert settings.dtype == ("bfloat16" if kind == "BF16" else "float32")
    formats = {matrix.format.name for matrix in read_facts(checkpoint).matrices}
    assert formats == {"float"} if kind == "BF16" else formats == {"float", "q8_0"} or formats == {"q8_0"}
    (text,) = texts((40,))
    exact, found = (Stepper(tmp_path / f"{each}.gguf", 1, dtype="float32").step({0: text})[0] for each in ("F32", kind))
    assert (found - exact).abs().mean() < 0.15 * exact.abs().mean()
