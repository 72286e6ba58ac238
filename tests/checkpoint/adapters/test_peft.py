"""Adapters that PEFT made, in models that transformers made: the same answers as theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.checkpoint.adapters.folder import read_adapter
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import AdapterError
from penstock.models.registry import read_spec
from penstock.models.sizes import adaptable
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_random
from tests.support.families import CASES as FAMILIES
from tests.support.families import DELTA, LATENTS, MAMBA, NEMOTRON, QWEN_EXPERTS, SHAPE
from tests.support.needs import needs_native

PROMPT = [7, 31, 101, 58, 3, 99, 140, 22, 64, 9]
TOKENS = 12
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "all linear maps": ("Llama", {}, {"target_modules": "all-linear"}),
    "a pattern of names, and ranks by patterns": (
        "Qwen3",
        {"head_dim": 12},
        {
            "target_modules": r".*\.(q_proj|up_proj|down_proj)",
            "rank_pattern": {r"layers\.1\.mlp\.up_proj": 2, "down_proj": 9},
            "alpha_pattern": {"q_proj": 3},
        },
    ),
    "rsLoRA of some layers": (
        "Mistral",
        {},
        {"target_modules": ["v_proj", "gate_proj"], "use_rslora": True, "layers_to_transform": [0, 2]},
    ),
    "fused maps": ("Phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}),
    "biases, and some modules left out": (
        "Qwen2",
        {},
        {"target_modules": ["k_proj", "o_proj"], "exclude_modules": r".*layers\.0\.self_attn\.k_proj"},
    ),
    "latent attention": (
        "DeepseekV2",
        LATENTS | {"first_k_dense_replace": 1},
        {"target_modules": r".*(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"},
    ),
    "queries, keys and values by head, beside an MLP": (
        "GPTNeoX",
        {"num_attention_heads": 2},
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    ),
    "matrices stored transposed": (
        "GPT2",
        {},
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ),
    "embeddings and output projection": ("Llama", {}, {"target_modules": ["embed_tokens", "lm_head", "up_proj"]}),
    "an embedding that is scaled and tied": (
        "Gemma2",
        {"head_dim": 12, "tie_word_embeddings": True},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ),
    "DoRA": ("Qwen2", {}, {"target_modules": "all-linear", "use_dora": True}),
    "DoRA of the output projection and fused maps": (
        "Phi3",
        {},
        {"target_modules": ["lm_head", "qkv_proj", "gate_up_proj"], "use_dora": True},
    ),
    "experts together, and their router": (
        "Qwen3Moe",
        QWEN_EXPERTS,
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
            "rank_pattern": {"down_proj": 3},
        },
    ),
    "experts under another name than in the file, one map": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {"target_modules": [], "target_parameters": ["experts.down_proj"], "use_rslora": True},
    ),
    "experts stored transposed and in turn": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 3},
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "shared experts with a gate": (
        "Qwen2Moe",
        QWEN_EXPERTS,
        {"target_modules": ["shared_expert_gate", "gate_proj", "down_proj"]},
    ),
    "per-layer embeddings, and maps between streams": (
        *FAMILIES["gemma3n"],
        {
            "target_modules": r".*(_per_layer|per_layer_\w+|linear_left|linear_right|altup_\w*projections\.\d)",
            "exclude_modules": r".*norm",
        },
    ),
    "delta nets": ("Qwen3_5", DELTA, {"target_modules": "all-linear"}),
    "delta nets, fused and grouped by key head": (
        "Qwen3Next",
        DELTA | QWEN_EXPERTS,
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
    "state spaces": ("GraniteMoeHybrid", MAMBA, {"target_modules": "all-linear"}),
    "state spaces with biases": ("NemotronH", NEMOTRON, {"target_modules": ["in_proj", "q_proj"]}),
    "short convolutions": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
        {"target_modules": "all-linear"},
    ),
}
SETTINGS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)


def write_peft(folder: Path, model: Any, **config: Any) -> Any:
    """Have PEFT write a random adapter of a model; returns both together, for reference."""
    import peft

    torch.manual_seed(1)
    made = peft.LoraConfig(**{"r": 5, "lora_alpha": 10, "task_type": "CAUSAL_LM", "init_lora_weights": False} | config)
    both = peft.get_peft_model(model, made).eval()
    for name, parameter in both.named_parameters():
        if "magnitude" in name:  # at first those of the weights, without effect
            parameter.data *= 0.7 + torch.rand_like(parameter)
    both.save_pretrained(folder)
    return both


def greedy(model: Any) -> list[tuple[int, float]]:
    """A model's most probable tokens, with their log-probabilities."""
    tokens, made = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(TOKENS):
            logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            made.append((tokens[-1], float(logprobs[tokens[-1]])))
    return made


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_that_of_peft(case: str, tmp_path: Path) -> None:
    family, shape, config = CASES[case]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = write_random(base, family, **SHAPE | shape)
    plain = greedy(model)
    wanted = greedy(write_peft(adapter, model, **config))
    assert wanted != plain
    options: dict[str, Any] = {"kv_cache_memory": "2MiB", "packed_cache": "off", "threads": 1, "max_model_len": 64}
    with LLM(str(base), adapter=f"a={adapter}", **options) as llm:
        for output, reference in zip(
            llm.generate([PROMPT, PROMPT], SETTINGS, adapter=["a", None]), (wanted, plain), strict=True
        ):
            made = output.outputs[0].logprobs
            assert made is not None
            assert [one.token_id for one in made] == [token for token, _ in reference]
            assert [one.logprob for one in made] == pytest.approx([value for _, value in reference], abs=1e-4)


IN_COMPANY = {
    "delta nets": ("Qwen3_5", DELTA, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
    "grouped delta nets": ("Qwen3Next", DELTA | QWEN_EXPERTS, ("in_proj_qkvz", "in_proj_ba", "out_proj")),
    "state spaces": ("GraniteMoeHybrid", MAMBA, ("in_proj", "out_proj")),
    "short convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, ("in_proj", "out_proj")),
    "embeddings": ("Llama", {}, ("embed_tokens", "lm_head")),
    "DoRA": ("Qwen2", {}, ("q_proj", "gate_proj", "down_proj", "lm_head")),
    "latent attention": ("DeepseekV2", LATENTS, ("kv_b_proj", "q_b_proj", "gate", "up_proj", "down_proj")),
    "experts": ("Qwen3Moe", QWEN_EXPERTS, ("gate_proj", "up_proj", "down_proj", "gate", "lm_head")),
}


@needs_native
@pytest.mark.parametrize("case", IN_COMPANY)
def test_adapters_of_each_kind_of_map_give_the_same_bits_in_any_company(case: str, tmp_path: Path) -> None:
    family, shape, targets = IN_COMPANY[case]
    base = tmp_path / "base"
    write_random(base, family, **SHAPE | shape)
    paths = [
        write_adapter(tmp_path / name, base, seed=seed, targets=targets, use_dora=case == "DoRA")
        for seed, name in enumerate("ab")
    ]
    names = [None, "a", "b", "a", None, "b"]
    prompts = [PROMPT[: 4 + index] for index in range(len(names))]
    options: dict[str, Any] = {"kv_cache_memory": "4MiB", "packed_cache": "off", "threads": 1, "max_model_len": 64}
    found = []
    for changes in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 6, "speculation": "ngram"}):
        with LLM(str(base), adapter=",".join(f"{path.name}={path}" for path in paths), **options, **changes) as llm:
            for prompt, name in [] if changes else zip(prompts, names, strict=True):
                found.append(llm.generate([prompt], SETTINGS, adapter=name)[0].outputs[0].logprobs)
            together = llm.generate(prompts, SETTINGS, adapter=names)
            assert [one.outputs[0].logprobs for one in together] == found
            unlike = [llm.generate([prompts[0]], SETTINGS, adapter=name)[0].outputs[0].logprobs for name in "ab"]
            assert unlike[0] != unlike[1] != found[0] != unlike[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"use_dora": True, "target_modules": ["embed_tokens"]},
            "use_dora: True, which is not supported for model.embed_tokens",
        ),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\], which is not supported"),
        ({"bias": "all"}, "bias: 'all', which is not supported"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ],
    ids=["DoRA of embeddings", "modules_to_save", "biases", "tokens"],
)
def test_what_is_not_obeyed_is_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_peft(adapter, write_random(base, "Llama", **SHAPE), **{"target_modules": ["q_proj"]} | config)
    with pytest.raises(AdapterError, match=f"the adapter 'a' cannot be used.*{words}"):
        read_adapter("a", str(adapter), adaptable(read_spec(open_checkpoint(str(base))), "float32"))


@pytest.mark.filterwarnings("ignore")
def test_a_copy_of_the_embedding_must_be_the_models(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_peft(adapter, write_random(base, "Llama", **SHAPE), target_modules=["lm_head"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.base_layer.weight"][3, 5] += 0.1
    save_file(tensors, adapter / "adapter_model.safetensors")
    options: dict[str, Any] = {"kv_cache_memory": "2MiB", "packed_cache": "off", "threads": 1, "max_model_len": 64}
    with LLM(str(base), adapter=f"a={adapter}", **options) as llm:
        failed, served = llm.generate([PROMPT, PROMPT], SETTINGS, adapter=["a", None])
    assert "lm_head.base_layer.weight is not the model's" in str(failed.outputs[0].error)
    assert served.outputs[0].error is None
