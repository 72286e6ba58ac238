"""Models that `transformers` computes over our cache: its own answers, or a refusal by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import CheckpointError, ConfigError
from penstock.runner.transformers_model import read_transformers_model
from tests.support.checkpoints import write_random
from tests.support.families import SHAPE

BIOGPT: dict[str, Any] = SHAPE | {"pad_token_id": 1}
OPTIONS: dict[str, Any] = {
    "backend": "transformers",
    "kv_cache_memory": "2MiB",
    "threads": 1,
    "max_model_len": 96,
    "dtype": "float32",
}
PROMPTS = [[7, 31, 101, 58, 3, 99, 140, 22, 64, 9] * 3, [5, 9, 77], [11] * 40]
TOKENS = 24
SETTINGS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    return [int(token) for token in made[0, len(prompt) :]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("BioGpt", BIOGPT),
        ("Mistral", SHAPE | {"sliding_window": 9, "head_dim": 20}),
        ("Mixtral", SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
    ids=["an architecture that Penstock lacks", "windows and grouped heads", "a mixture of experts"],
)
def test_answers_are_those_of_generate_alone_in_chunks_and_in_company(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    model = write_random(tmp_path, family, **shape)
    wanted = [generated(model, prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        scores = model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    for changes in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 4, "speculation": "ngram", "block_size": 8}):
        with LLM(str(tmp_path), **OPTIONS, **changes) as llm:
            alone = [] if changes else [llm.generate([prompt], SETTINGS)[0] for prompt in PROMPTS[1:]]
            together = llm.generate(PROMPTS, SETTINGS)
            again = llm.generate(PROMPTS[:1], SETTINGS)
        for output, tokens in zip(
            [*alone, *together, *again], [*wanted[1:][: len(alone)], *wanted, wanted[0]], strict=True
        ):
            assert output.outputs[0].token_ids == tokens
        assert together[0].prompt_logprobs is not None
        for place, entry in enumerate(together[0].prompt_logprobs[1:]):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(scores[place, PROMPTS[0][place + 1]]), abs=1e-4)


def test_an_unknown_architectures_error_names_the_flag_and_a_start_says_what_it_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_random(tmp_path, "BioGpt", **BIOGPT)
    with pytest.raises(CheckpointError, match=r"BioGptForCausalLM, which is unknown.*backend transformers may run it"):
        LLM(str(tmp_path))
    with LLM(str(tmp_path), **OPTIONS):
        lines = [record.message for record in caplog.records if "transformers" in record.message]
    assert len(lines) == 1
    assert "more slowly, and an answer may depend on what else is in its batch" in lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int8"}, "quantization is not supported with backend transformers"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is not"),
        ({"adapter_memory": "1MiB"}, "adapter is not"),
        ({"speculation": "mtp"}, "speculation=mtp is not"),
    ],
)
def test_options_that_it_lacks_are_refused_by_name(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OPTForCausalLM"], "model_type": "opt"}))
    with pytest.raises(ConfigError, match=words):
        LLM(str(tmp_path), **OPTIONS, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 16},
            "layers of the type linear_attention",
        ),
        (
            {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_layer": 1, "n_embd": 64, "n_head": 4},
            "takes no other attention",
        ),
        (
            {"architectures": ["DogeForCausalLM"], "model_type": "doge", "num_hidden_layers": 1, "hidden_size": 64},
            "makes an attention mask of its own",
        ),
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt", "quantization_config": {"bits": 4}}, "quantized"),
        (
            {"architectures": ["OPTForCausalLM"], "model_type": "opt", "layer_types": ["chunked_attention"] * 12},
            "of the type",
        ),
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}, "has no class for decoders of .nosuch"),
        ({"architectures": ["OPTModel"], "model_type": "opt"}, "OPTModel, not that of a decoder"),
    ],
)
def test_models_that_the_paged_cache_cannot_serve_are_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"backend transformers cannot run this model: .*{words}"):
        LLM(str(tmp_path), **OPTIONS)


def test_the_trace_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    write_random(tmp_path, "Mixtral", **SHAPE, num_local_experts=4)
    assert read_transformers_model(open_checkpoint(str(tmp_path))).config._experts_implementation is None


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_random(tmp_path, "BioGpt", **BIOGPT)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["biogpt.layers.1.fc1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing weights, as .*layers\.1\.fc1\.weight"):
        LLM(str(tmp_path), **OPTIONS)
