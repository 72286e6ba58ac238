"""No setting of a config.json is read and dropped: another value of it makes another model, or is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.errors import CheckpointError
from penstock.models import hf_keys
from penstock.models.architectures import ARCHITECTURES
from penstock.models.registry import read_spec
from penstock.models.spec import ModelSpec
from tests.support.families import CASES, LONGROPE, SHAPE, class_name

WITHOUT_EFFECT: dict[str, set[str]] = {
    "Bloom": {
        "slow_but_exact",
        *("intermediate_size", "max_position_embeddings", "num_key_value_heads"),  # which are not its own
    },
    "Mpt": {
        *("embedding_fraction", "learned_pos_emb", "init_device", "emb_pdrop"),
        *("intermediate_size", "max_position_embeddings", "num_key_value_heads"),  # which are not its own
    },
    "OPT": {
        *("layerdrop", "init_std", "dropout"),
        *("intermediate_size", "num_key_value_heads"),  # which are not its own
    },
    "Falcon": {"intermediate_size", "num_key_value_heads"},  # which are not its own
    "FalconH1": {"mamba_chunk_size", "num_logits_to_keep"},
    "GPTBigCode": {
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        *("intermediate_size", "num_key_value_heads"),  # which are not its own
    },
    "Gemma3n": {"altup_coef_clip"},
    "GPTJ": {"intermediate_size", "num_key_value_heads"},  # which are not its own
    "HYV3": {"enable_moe_fp32_combine"},
    "Jamba": {"use_mamba_kernels", "use_mambapy", "use_associative_scan"},
    "KimiLinear": {"head_dim", "n_routed_experts"},  # which its code does not read
    "SolarOpen": {"intermediate_size"},  # which is not its own
    "Bamba": {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
    "DeepseekV32": {"index_head_dim", "index_n_heads"},  # of the indexer, which chooses all keys
    "GPT2": {
        *("summary_type", "summary_use_proj", "summary_proj_to_labels", "summary_first_dropout"),
        *("reorder_and_upcast_attn", "intermediate_size", "num_key_value_heads"),  # the last two are not its own
    },
    "GlmMoeDsa": {"index_head_dim", "index_n_heads"},
    "Llama4": {"router_jitter_noise"},
    "Mixtral": {"router_jitter_noise"},
    "MiniMaxM2": {"router_jitter_noise"},
    "Phimoe": {"input_jitter_noise"},
    "Qwen3_5Moe": {"intermediate_size"},  # which is not its own
    "GraniteMoeHybrid": {"mamba_chunk_size"},
    "NemotronH": {
        *("chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("time_step_max", "time_step_floor", "rescale_prenorm_residual", "num_logits_to_keep"),
        *("expand", "mamba_proj_bias", "n_shared_experts", "num_nextn_predict_layers"),  # which its code does not read
        "time_step_min",  # which it heeds in prompts alone
    },
}
"""By family: settings of training and of other implementations."""
INTERVALS = {
    "sliding_window_pattern": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "interleave_moe_layer_step": "moe_layers",
    "first_k_dense_replace": "mlp_layer_types",
    "global_attn_every_n_layers": "layer_types",
}
"""Settings that a list of the layers goes before, which is taken out to try them."""
SHOWN_BY_TENSORS = {
    *("intermediate_size", "moe_intermediate_size", "n_shared_experts", "num_key_value_heads", "num_hidden_layers"),
    *("q_lora_rank", "v_head_dim", "num_nextn_predict_layers"),
}
"""Sizes whose defaults need not be those of `transformers`: a wrong one is refused by the shapes of the tensors."""
OTHER_DEFAULTS: dict[str, set[str]] = {
    "Phi3": {"original_max_position_embeddings"},  # whose default goes before the value in `rope_parameters`
}
FAMILIES = sorted({family for family, _ in CASES.values()})
LONG = {key: value for key, value in LONGROPE["rope_parameters"].items() if key != "rope_theta"}
SCALINGS: dict[str, dict[str, Any]] = {
    "Phi3": LONG,
    "Phimoe": {**LONG, "short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 64},
    "Mistral4": {"rope_type": "yarn", "factor": 3.0, "llama_4_scaling_beta": 0.2},
    "Ministral3": {"rope_type": "yarn", "factor": 3.0, "llama_4_scaling_beta": 0.2},
}
"""`rope_scaling` by family where it is not `linear`."""
NEVER_SCALED = {
    *("Bloom", "GPT2", "GPTBigCode", "GPTJ", "Gemma4", "Jamba", "KimiLinear", "Lfm3", "Mpt", "NemotronH", "OPT"),
}
"""Families without RoPE, or newer than `rope_scaling`."""


@pytest.mark.parametrize("family", FAMILIES)
def test_another_value_makes_another_model_or_is_refused(tmp_path: Path, family: str) -> None:
    effective: set[str] = set()
    settings: set[str] = set()
    for name, changes in CASES.values():
        if name == family:
            config = written(tmp_path, family, SHAPE | changes)
            usual = read(tmp_path, config)
            for key, value in others(config):
                settings.add(key)
                without = {INTERVALS[key]: None} if key in INTERVALS else {}
                before = read(tmp_path, config | without) if without else usual
                if read(tmp_path, config | without | {key: value}) != before:
                    effective.add(key)
    assert settings - effective - WITHOUT_EFFECT.get(family, set()) == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_settings_have_the_defaults_of_transformers(tmp_path: Path, family: str) -> None:
    differ: set[str] = set()
    for name, changes in CASES.values():
        if name == family:
            config = written(tmp_path, family, SHAPE | changes)
            for key in config.keys() - SHOWN_BY_TENSORS - {"architectures", "model_type"}:
                rest = {other: value for other, value in config.items() if other != key}
                completed = with_defaults(tmp_path, family, rest)
                ours, theirs = read(tmp_path, rest), completed and read(tmp_path, completed)
                if None not in (ours, theirs) and ours != theirs:
                    differ.add(key)
    assert differ - OTHER_DEFAULTS.get(family, set()) == set()


@pytest.mark.parametrize("family", sorted({*FAMILIES} - NEVER_SCALED))
def test_rope_scaling_goes_before_rope_parameters_as_in_transformers(tmp_path: Path, family: str) -> None:
    scaling = SCALINGS.get(family, {"rope_type": "linear", "factor": 3.0})
    tried = 0
    for name, changes in CASES.values():
        config = written(tmp_path, family, SHAPE | changes) if name == family else {}
        if config.get("rope_parameters"):
            scaled = config | {"rope_scaling": scaling | {"rope_theta": 5e3, **partial(config)}}
            theirs = with_defaults(tmp_path, family, scaled)
            usual, expected = read(tmp_path, config), theirs and read(tmp_path, theirs)
            assert read(tmp_path, scaled) == expected
            tried += expected not in (None, usual)
    assert tried


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 5e5), ("partial_rotary_factor", 0.5)])
def test_rope_scaling_that_would_undo_settings_of_rope_parameters_is_refused(
    tmp_path: Path, key: str, value: float
) -> None:
    config = written(tmp_path, "Llama", SHAPE)
    config["rope_parameters"] = {"rope_type": "default", key: value}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 3.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"set {key} in rope_scaling, too"):
        read_spec(open_checkpoint(str(tmp_path)))
    config["rope_scaling"][key] = value
    assert read(tmp_path, config) is not None


def test_rope_scaling_of_a_gemma_4_is_refused_with_its_place(tmp_path: Path) -> None:
    changes = next(changes for family, changes in CASES.values() if family == "Gemma4")
    config = written(tmp_path, "Gemma4", SHAPE | changes)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "linear", "factor": 2}}))
    with pytest.raises(CheckpointError, match="put its settings into full_attention of rope_parameters"):
        read_spec(open_checkpoint(str(tmp_path)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_whose_attention_is_not_causal_is_refused(tmp_path: Path, family: str) -> None:
    changes = next(changes for name, changes in CASES.values() if name == family)
    config = written(tmp_path, family, SHAPE | changes)
    assert read(tmp_path, config | {"is_causal": True}) == read(tmp_path, config) is not None
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(CheckpointError, match=r"is_causal|can embed texts, but not generate"):
        read_spec(open_checkpoint(str(tmp_path)))


def test_a_nemotron_without_attention_and_mamba_is_refused(tmp_path: Path) -> None:
    config = written(tmp_path, "NemotronH", SHAPE | CASES["nemotron-h"][1])
    (tmp_path / "config.json").write_text(json.dumps(config | {"layers_block_type": ["mlp", "moe"]}))
    with pytest.raises(CheckpointError, match="must have a layer of attention or of Mamba"):
        read_spec(open_checkpoint(str(tmp_path)))


def test_every_family_is_tried() -> None:
    assert {class_name(family) for family in FAMILIES} == {
        name for name in ARCHITECTURES if name.endswith(("ForCausalLM", "LMHeadModel"))
    } - {"BailingMoeV2ForCausalLM"}  # which `transformers` lacks


def partial(config: dict[str, Any]) -> dict[str, float]:
    """The `partial_rotary_factor` that `rope_parameters` has."""
    key = "partial_rotary_factor"
    return {key: config["rope_parameters"][key]} if key in config["rope_parameters"] else {}


def written(folder: Path, family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The config.json that `transformers` writes, with all of its keys."""
    import transformers

    name = class_name(family)
    config = getattr(transformers, name).config_class(architectures=[name], **changes)
    config.to_json_file(folder / "config.json", use_diff=False)
    made: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return made


def with_defaults(folder: Path, family: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """This config.json with what `transformers` puts in the place of absent keys; None: it refuses it."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    kind = getattr(transformers, class_name(family)).config_class
    text = json.dumps(config).replace('{"__float__": "Infinity"}', "Infinity")
    try:
        kind.from_dict(json.loads(text)).to_json_file(folder / "config.json", use_diff=False)
    except (StrictDataclassError, ZeroDivisionError):
        return None
    made: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return made


def others(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings that may have an effect, each with another value."""
    for key, value in config.items():
        if key not in hf_keys.WITHOUT_EFFECT and isinstance(value, (bool, int, float, str)):
            yield key, not value if isinstance(value, bool) else "another" if isinstance(value, str) else 2 * value + 1


def read(folder: Path, config: dict[str, Any]) -> ModelSpec | None:
    """None: it is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return read_spec(open_checkpoint(str(folder)))
    except CheckpointError:
        return None
