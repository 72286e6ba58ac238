"""A GGUF file's metadata as a model config: what is read, what is refused, what is reported."""

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.checkpoint.gguf.config import partial_rotary
from penstock.config.model_facts import ModelFacts
from penstock.errors import CheckpointError
from penstock.models.registry import read_facts, read_spec
from tests.support.checkpoints import write_random
from tests.support.families import SHAPE
from tests.support.gguf_files import write_gguf
from tests.support.stepping import Stepper


def facts(file: Path) -> ModelFacts:
    return read_facts(open_checkpoint(str(file)))


def test_sizes_are_those_of_the_folder_that_it_was_made_of(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_llama)
    from_folder, from_file = (read_spec(open_checkpoint(str(path))) for path in (tiny_llama, tmp_path / "model.gguf"))
    eps = from_folder.final_norm.eps
    assert from_file.final_norm.eps == pytest.approx(eps, rel=1e-7)  # the file has it in float32
    assert repr(from_file).replace(repr(from_file.final_norm.eps), repr(eps)) == repr(from_folder)


@pytest.mark.parametrize(("stored", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_floats_compute_in_their_own_type(tiny_llama: Path, tmp_path: Path, stored: str, dtype: str) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_llama, stored)
    assert facts(tmp_path / "model.gguf").dtype == dtype


def test_floats_of_several_types_compute_in_one_that_holds_them(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_llama, lambda name: "F16" if "attn" in name else "BF16")
    assert facts(tmp_path / "model.gguf").dtype == "float32"


def test_what_llama_cpp_reads_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "usual.gguf", tiny_llama)
    usual = read_spec(open_checkpoint(str(tmp_path / "usual.gguf")))
    equal: dict[str, Any] = {
        "attention__head_count_kv": [2, 2],
        "attention__head_count": [4, 4],
        "feed_forward_length": [128, 128],
    }
    for key, value in (equal | {"attention__sliding_window": 0}).items():
        write_gguf(tmp_path / "model.gguf", tiny_llama, **{f"llama__{key}": value})
        assert read_spec(open_checkpoint(str(tmp_path / "model.gguf"))) == usual


def test_every_part_of_a_head_is_rotated_in_whole_elements() -> None:
    for head_dim, rotated in ((92, 52), (64, 64), (128, 32), (80, 1)):
        share = partial_rotary(head_dim, rotated)
        assert int(head_dim * share) == rotated
        assert share == pytest.approx(rotated / head_dim)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"general__architecture": None}, "lacks general.architecture"),
    "an unknown architecture": (
        {"general__architecture": "mamba"},
        "unknown architecture 'mamba'; supported: ",
    ),
    "a number as architecture": ({"general__architecture": 5}, "general.architecture .* must be a string, not 5"),
    "pooling to a score": ({"llama__pooling_type": 4}, r"pooling_type 4 .* supported: 0 \(none\), 1 \(mean\), 2"),
    "bidirectional attention": ({"llama__attention__causal": False}, "attention.causal False .* is not supported"),
    "no layers": ({"llama__block_count": None}, "lacks llama.block_count"),
    "a text as size": ({"llama__embedding_length": "64"}, "llama.embedding_length .* must be an integer"),
    "a size a layer": ({"llama__feed_forward_length": [128, 64]}, "must be an integer, not an array of 2"),
    "a size of 0": ({"llama__embedding_length": 0}, "hidden_size .* must be from 1"),
    "no heads": ({"llama__attention__head_count": 0}, "head_count 0 .* must be at least 1"),
    "heads that do not share": ({"llama__attention__head_count_kv": 3}, "4 query heads cannot share 3 key heads"),
    "an absurd number of layers": (
        {"llama__block_count": 2**31 - 1},
        "block_count 2147483647 .* the file has the tensors of 2 blocks",
    ),
    "more layers of a head than layers": ({"llama__nextn_predict_layers": 2}, "block_count 2 .* is not supported"),
    "layers of a head that make up for layers": (
        {"llama__nextn_predict_layers": -2, "llama__block_count": 0},
        "nextn_predict_layers -2 .* must be from 0 to 64",
    ),
    "sizes that the file cannot hold": (
        {"llama__feed_forward_length": 2**20},
        "elements: tensors are missing, or one of",
    ),
    "an epsilon that is NaN": (
        {"llama__attention__layer_norm_rms_epsilon": float("nan")},
        "layer_norm_rms_epsilon .* must be a number, not nan",
    ),
    "experts": ({"llama__expert_count": 8}, "lacks .*llama.expert_used_count"),
    "other values than keys": ({"llama__attention__value_length": 8}, "value_length 8 .* is not supported"),
    "rope on a part": ({"llama__rope__dimension_count": 8}, "rope.dimension_count 8 .* is not supported"),
    "another rope": ({"llama__rope__scaling__type": "longrope"}, "'longrope' .* none, linear and yarn are"),
    "a temperature below 0": ({"general__sampling__temp": -1.0}, "^general.sampling.temp in .*: temperature must be"),
    "a penalty of 0": (
        {"general__sampling__penalty_repeat": 0.0},
        "^general.sampling.penalty_repeat in .*: repetition_penalty must be",
    ),
    "an eos token beyond all": ({"tokenizer__ggml__eos_token_id": 4000}, "eos_token_id .* is 4000, but there are"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_name(tiny_llama: Path, tmp_path: Path, case: str) -> None:
    metadata, told = BAD[case]
    write_gguf(tmp_path / "model.gguf", tiny_llama, **metadata)
    with pytest.raises(CheckpointError, match=told) as caught:
        facts(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_a_files_sampling_defaults_are_obeyed(tiny_llama: Path, tmp_path: Path) -> None:
    given = {"temp": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "penalty_repeat": 1.1}
    metadata = {f"general__sampling__{name}": value for name, value in given.items()}
    write_gguf(tmp_path / "model.gguf", tiny_llama, **metadata)
    defaults = open_checkpoint(str(tmp_path / "model.gguf")).generation
    assert defaults.has_sampling
    values = (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p, defaults.repetition_penalty)
    assert values == pytest.approx(tuple(given.values()))


def test_a_files_sampling_that_is_not_obeyed_is_reported(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = {"general__sampling__mirostat": 2, "general__sampling__sequence": "top_k;temperature"}
    write_gguf(tmp_path / "model.gguf", tiny_llama, **metadata)
    with caplog.at_level(logging.WARNING):
        Stepper(tmp_path / "model.gguf", 1)
    (message,) = [record.message for record in caplog.records if "no effect" in record.message]
    assert message.startswith(f"{tmp_path}/model.gguf: these settings have no effect")
    assert message.endswith(": general.sampling.sequence, general.sampling.mirostat")


def test_a_key_of_the_architecture_that_is_unknown_is_reported(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_llama, llama__swin_norm=True)
    with caplog.at_level(logging.WARNING):
        Stepper(tmp_path / "model.gguf", 1)
    (message,) = [record.message for record in caplog.records if "no effect" in record.message]
    assert message.endswith("these settings are unknown and have no effect: llama.swin_norm")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_random(tmp_path / "hf", "Llama", **SHAPE)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", split_after=10)
    first = tmp_path / "model-00001-of-00003.gguf"
    assert len(facts(first).layers) == SHAPE["num_hidden_layers"]


def test_tokens_that_end_a_text_are_those_that_the_file_names_and_control_tokens_known_for_it(
    tiny_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_llama, tokenizer__ggml__eot_token_id=3)
    assert open_checkpoint(str(file)).generation == GenerationDefaults(eos_token_ids=(0, 3))
    write_gguf(file, tiny_llama, tokenizer__ggml__eos_token_id=2)
    assert open_checkpoint(str(file)).generation.eos_token_ids == (2, 0)  # 0 is <|end|>
    write_gguf(file, tiny_llama, tokenizer__ggml__model="none", tokenizer__ggml__eos_token_id=7)
    assert open_checkpoint(str(file)).generation.eos_token_ids == (7,)


def test_defaults_of_sampling_come_from_the_file(tiny_llama: Path, tmp_path: Path) -> None:
    sampling = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.25}
    write_gguf(tmp_path / "model.gguf", tiny_llama, **{f"general__sampling__{key}": v for key, v in sampling.items()})
    assert open_checkpoint(str(tmp_path / "model.gguf")).generation == GenerationDefaults(
        eos_token_ids=(0,), temperature=0.5, top_k=20, top_p=0.75, min_p=0.125, repetition_penalty=1.25
    )
    write_gguf(tmp_path / "model.gguf", tiny_llama, general__sampling__top_k=-1)  # llama.cpp: all tokens
    assert open_checkpoint(str(tmp_path / "model.gguf")).generation.top_k == 0
