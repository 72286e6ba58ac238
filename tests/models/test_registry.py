"""What a config.json becomes, and every way that it can ask for what we do not have."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.model_facts import ActivationSizes, KVSpec, LayerFacts, Matrix, ModelFacts
from penstock.config.weight_formats import FLOAT
from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.rope import RopeConfig
from penstock.models.architectures import ARCHITECTURES
from penstock.models.hf_config import HFConfig
from penstock.models.registry import read_facts, read_spec
from penstock.models.spec import ModelSpec
from tests.support.stepping import Stepper

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4}


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(open_checkpoint(str(folder)))


def windows_of(spec: ModelSpec) -> tuple[int | None, ...]:
    caches = [layer.facts.cache for layer in spec.layers]
    return tuple(cache.window for cache in caches if cache is not None)


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """The first layer's."""
    mixer = spec.layers[0].mixer
    assert mixer is not None
    assert isinstance(mixer.part, AttentionSpec)
    return mixer.part


def test_the_facts_of_a_checkpoint_are_those_of_its_config(tiny_llama: Path) -> None:
    facts = read_facts(open_checkpoint(str(tiny_llama)))
    assert replace(facts, matrices=()) == ModelFacts(
        name=tiny_llama.name,
        dtype="float32",
        num_parameters=123_200,
        max_position=512,
        vocab_size=384,
        hidden_size=64,
        layers=(LayerFacts(KVSpec(2, 16), (ActivationSizes(256, 256, 64), ActivationSizes(128, 384, 128))),) * 2,
        rotary_dim=16,
        matrices=(),
        adapted_rows=512,
    )
    assert len(facts.matrices) == 2 * 7 + 2
    assert Matrix("model.layers.0.self_attn.k_proj", 32, 64, FLOAT) in facts.matrices
    assert Matrix("model.embed_tokens", 384, 64, FLOAT, multiplied=False) in facts.matrices


def test_reading_the_facts_of_a_model_loads_no_torch(tiny_llama: Path) -> None:
    code = f"""
import sys
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.models.registry import read_facts
read_facts(open_checkpoint({str(tiny_llama)!r}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_architecture_is_named_with_those_like_it_and_where_all_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="architecture LlamaForCasualLM, which is unknown; did you mean Llama"):
        read(tmp_path, LLAMA | {"architectures": ["LlamaForCasualLM"]})
    for name in ("xyz", "PersimmonForCausalLM", "Lfm9ForCausalLM", "MiniMaxM9ForCausalLM", "Qwen9MoeForCausalLM"):
        with pytest.raises(CheckpointError, match=rf"architecture {name}, which is unknown; docs/models\.md lists"):
            read(tmp_path, LLAMA | {"architectures": [name]})


def test_settings_of_generation_config_without_effect_are_named(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).symlink_to(file)
    generation = tmp_path / "generation_config.json"
    for given, named in (
        (
            {"guidance_scale": 2.0, "penalty_alpha": 0.6, "num_beams": 1, "top_p": 0.5},
            "guidance_scale, penalty_alpha",
        ),
        ({"max_length": 9, "stop_strings": ["a"], "max_new_tokens": 7, "min_length": 0}, "max_length"),
        ({"eos_token_id": 0, "top_k": 5, "no_repeat_ngram_size": 0}, None),
    ):
        caplog.clear()
        generation.unlink()
        generation.write_text(json.dumps(given))
        Stepper(tmp_path, 1)
        warned = [record.message for record in caplog.records if "generation_config.json" in record.message]
        assert [warning.rpartition(": ")[2] for warning in warned] == ([] if named is None else [named])


def test_a_config_without_an_architecture_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="architecture none"):
        read(tmp_path, {})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, "8", 0, True, 2.5])
def test_a_size_that_is_missing_or_no_number_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        read(tmp_path, LLAMA | {key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .* is not supported; supported: 'silu'"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config 'exl2'"),
        ({"torch_dtype": "float64"}, "dtype 'float64'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' .* lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor .* must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "setting of rope type 'linear' 'twist'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": 3}, "rope_scaling .* must be an object"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads .* must be from 1"),
        ({"head_dim": 7}, "not 7"),
        ({"partial_rotary_factor": 2.0}, "not 16"),
        ({"attention_bias": "yes"}, "attention_bias .* must be true or false"),
        ({"max_position_embeddings": -5}, "max_position_embeddings .* must be from 1"),
    ],
)
def test_what_we_do_not_implement_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, LLAMA | changes)


def test_a_setting_that_nobody_reads_is_reported_once(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    settings = {"use_cache": True, "_name_or_path": "x", "final_logit_softcapping": 30.0}
    (folder / "config.json").write_text(json.dumps(config | settings))
    code = f"import logging; logging.basicConfig(); from penstock import LLM; LLM({str(folder)!r}).close()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.count("final_logit_softcapping") == 1
    assert "use_cache" not in run.stderr
    assert "_name_or_path" not in run.stderr


NEEDED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Gemma3nForCausalLM": {"num_hidden_layers": 2, "num_kv_shared_layers": 0},  # whose sizes are those of its layers
    "Gemma3nForConditionalGeneration": {"text_config": {"num_hidden_layers": 2, "num_kv_shared_layers": 0}},
    "Glm4MoeForCausalLM": {"head_dim": 128},  # half of the default cannot be turned
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0},
    "Qwen3OmniMoeForConditionalGeneration": {"thinker_config": {"text_config": {"head_dim": 128}}},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"text_config": {"head_dim": 128}},
}
"""Settings without a default that works."""


@pytest.mark.parametrize("only_changed", [True, False])
@pytest.mark.parametrize(
    "architecture", sorted(set(ARCHITECTURES) - {"BailingMoeV2ForCausalLM", "Qwen2_5OmniModel"})
)  # which it lacks
def test_nothing_that_transformers_writes_is_reported(tmp_path: Path, architecture: str, only_changed: bool) -> None:
    import transformers

    config = getattr(transformers, architecture).config_class(
        architectures=[architecture], **NEEDED.get(architecture, {})
    )
    config.get_text_config().num_hidden_layers = 2
    for per_layer in ("layer_types", "mlp_layer_types", "layer_rope_theta"):
        if per_layer in vars(config.get_text_config()):
            setattr(config.get_text_config(), per_layer, None)
    config.name_or_path = "some/where"
    config.to_json_file(tmp_path / "config.json", use_diff=only_changed)
    assert unread(tmp_path) == []


def test_what_older_versions_of_transformers_wrote_is_not_reported(tmp_path: Path) -> None:
    older = {
        "_name_or_path": "some/where",
        "_model_name_or_path": "Some Model",  # of a GGUF file that it converted
        "_commit_hash": None,
        "_attn_implementation_autoset": True,
        "add_cross_attention": False,
        "cross_attention_hidden_size": None,
        "finetuning_task": None,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "prefix": None,
        "problem_type": None,
        "pruned_heads": {},
        "task_specific_params": None,
        "tf_legacy_loss": False,
        "tie_encoder_decoder": False,
        "torchscript": False,
        "use_bfloat16": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | older))
    assert unread(tmp_path) == []


def unread(folder: Path) -> list[str]:
    config = HFConfig(open_checkpoint(str(folder)))
    ARCHITECTURES[config.need("architectures", list)[0]](config)
    return config.unread()


def test_old_and_new_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    settings = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    wanted = RopeConfig(
        dim=8, theta=5e5, type="llama3", factor=8.0, original_max_position=16, low_freq_factor=1.0, high_freq_factor=4.0
    )
    for changes in (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **settings}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **settings}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **settings}},
    ):
        assert attention_of(read(tmp_path, LLAMA | changes)).rope == wanted


def test_part_of_a_head_may_be_rotated(tmp_path: Path) -> None:
    assert attention_of(read(tmp_path, LLAMA | {"partial_rotary_factor": 0.5})).rope.dim == 4


def test_a_context_that_yarn_stretches_is_served_whole(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(tmp_path, LLAMA | {"rope_scaling": yarn}).max_position == 256
    assert read(tmp_path, LLAMA | {"rope_scaling": yarn, "max_position_embeddings": 256}).max_position == 256
    assert read(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}).max_position == 64


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8, 8)),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", *["full_attention"] * 3],
            },
            (8, None, None, None),
        ),
    ],
)
def test_qwen_slides_only_where_it_says_that_it_does(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert windows_of(read(tmp_path, QWEN | changes)) == windows


def test_mistral_slides_in_every_layer_or_none(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert windows_of(read(tmp_path, mistral | {"sliding_window": 8})) == (8, 8)
    assert windows_of(read(tmp_path, mistral | {"sliding_window": None})) == (None, None)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["full_attention"], "has 1 entries for 4 layers"),
        (["full_attention", "chunked_attention"], "layer_types 'chunked_attention'"),
    ],
)
def test_layer_types_that_make_no_sense_are_refused(tmp_path: Path, kinds: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, QWEN | {"layer_types": kinds})
