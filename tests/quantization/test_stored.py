"""Quantized checkpoints: every weight arrives as it was stored, and what cannot be read so is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.checkpoint import open_checkpoint
from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.ops import make_ops
from penstock.layers.attention import Attention
from penstock.layers.linear import GatedMLP
from penstock.models.decoder import Decoder
from penstock.models.registry import load_model, read_facts
from penstock.quantization.scheme import HINT
from tests.quantization.stored import (
    AWQ_CONFIG,
    GPTQ_CONFIG,
    Map,
    awq,
    compressed_config,
    gptq,
    gptq_symmetric,
    gptq_v2,
    gptq_v2_symmetric,
    packed,
    packed_symmetric,
    write_int4,
    write_int8,
)
from tests.stepping import settings_for

GROUPS_OF_32 = {"num_bits": 4, "strategy": "group", "group_size": 32}
GROUPED = {"num_bits": 4, "strategy": "group", "group_size": 128}
ROWS = {"num_bits": 4, "strategy": "channel"}
W8A8 = {"num_bits": 8, "strategy": "channel"}
INT4 = {
    "gptq": (gptq, GPTQ_CONFIG, 1),
    "gptq, whole rows": (gptq, GPTQ_CONFIG | {"group_size": -1}, 0),
    "gptq_v2": (gptq_v2, GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"}, 1),
    "gptq, groups of 32": (gptq, GPTQ_CONFIG | {"group_size": 32}, 4),
    "gptq, symmetric": (gptq_symmetric, GPTQ_CONFIG | {"sym": True}, 1),
    "gptq_v2, symmetric": (gptq_v2_symmetric, GPTQ_CONFIG | {"sym": True, "checkpoint_format": "gptq_v2"}, 1),
    "awq": (awq, AWQ_CONFIG, 1),
    "awq, groups of 64": (awq, AWQ_CONFIG | {"group_size": 64}, 2),
    "packed, groups of 32": (packed, compressed_config("pack-quantized", **GROUPS_OF_32, symmetric=False), 4),
    "packed": (packed_symmetric, compressed_config("pack-quantized", **GROUPED), 1),
    "packed, whole rows": (packed_symmetric, compressed_config("pack-quantized", **ROWS), 0),
    "packed, with zeros": (packed, compressed_config("pack-quantized", **GROUPED, symmetric=False), 1),
}


def load(folder: Path) -> Decoder:
    checkpoint, settings = settings_for(folder)
    model = load_model(checkpoint, settings, make_ops(torch.device("cpu")))
    assert isinstance(model, Decoder)
    return model


def rows_of(model: Decoder, name: str, maps: dict[str, Map]) -> Tensor:
    """The weight of one map of the checkpoint, as the model has it."""
    block, linear = name.rsplit(".", 1)
    index = block.split(".")[2]
    layer = model.layers[int(index)]
    attention, mlp = layer._mixer, layer._feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(mlp, GatedMLP)
    for part, names in (
        (attention.qkv, ("q_proj", "k_proj", "v_proj")),
        (attention.output, ("o_proj",)),
        (mlp.gate_up, ("gate_proj", "up_proj")),
        (mlp.down, ("down_proj",)),
    ):
        if linear in names:
            sizes = [len(maps[f"{block}.{one}"].q) for one in names]
            first = sum(sizes[: names.index(linear)])
            return part.weight.lookup(torch.arange(first, first + sizes[names.index(linear)]))
    raise AssertionError(name)


def check(folder: Path, maps: dict[str, Map]) -> None:
    model = load(folder)
    assert len(maps) == 14
    for name, stored in maps.items():
        torch.testing.assert_close(rows_of(model, name, maps), stored.weight(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("form", "config", "groups"), INT4.values(), ids=INT4.keys())
def test_weights_of_4_bits_arrive_as_they_were_stored(
    tmp_path: Path, form: Callable[[Map], dict[str, Tensor]], config: dict[str, Any], groups: int
) -> None:
    check(tmp_path, write_int4(tmp_path, form, config, groups))


@pytest.mark.parametrize("status", ["compressed", "frozen"])
def test_weights_of_8_bits_arrive_as_they_were_stored(tmp_path: Path, status: str) -> None:
    config = compressed_config("int-quantized", **W8A8) | {"quantization_status": status}
    check(tmp_path, write_int8(tmp_path, config))


def test_tensors_that_belong_together_may_lie_in_different_files(tmp_path: Path) -> None:
    maps = write_int4(tmp_path, gptq, GPTQ_CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: "2.safetensors" if name.endswith("scales") else "1.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check(tmp_path, maps)


def test_a_quantized_checkpoint_answers_and_its_facts_name_the_format(tmp_path: Path) -> None:
    write_int4(tmp_path, awq, AWQ_CONFIG)
    facts = read_facts(open_checkpoint(str(tmp_path)))
    assert facts.stored_format == "awq"
    with LLM(str(tmp_path), kv_cache_memory="8MiB", threads=1) as llm:
        answer = llm.generate("hello", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(answer[0].outputs[0].token_ids) == 4


def test_it_is_not_rounded_again(tmp_path: Path) -> None:
    write_int4(tmp_path, gptq, GPTQ_CONFIG)
    with pytest.raises(ConfigError, match=r"already quantized \(gptq\)"):
        settings_for(tmp_path, quantization="int8")


def changed(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with other settings for activations."""
    group = config["config_groups"]["group_0"] | {"input_activations": weights}
    return config | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' .* supported: 'gptq', 'awq', 'compressed-tensors'"),
        ({}, "lacks 'quant_method'"),
        (GPTQ_CONFIG | {"bits": 3}, "bits 3 .* supported: 4"),
        ({"quant_method": "gptq"}, "lacks 'bits'"),
        (GPTQ_CONFIG | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ_CONFIG | {"group_size": 0}, "group_size 0 .* 'multiples of 32'"),
        (AWQ_CONFIG | {"version": "gemv"}, "version 'gemv' .* supported: 'gemm'"),
        (compressed_config("pack-quantized", num_bits=8, strategy="channel"), "num_bits 8"),
        (compressed_config("nvfp4-pack-quantized", **W8A8), "format 'nvfp4-pack-quantized'"),
        (compressed_config("int-quantized", num_bits=8, strategy="group"), "strategy 'group'"),
        (compressed_config("int-quantized", **W8A8, symmetric=False), "symmetric False"),
        (compressed_config("pack-quantized", **GROUPED, actorder="group"), "actorder 'group'"),
        (compressed_config("int-quantized", **W8A8) | {"config_groups": {}}, "0 config_groups"),
        (compressed_config("int-quantized", **W8A8) | {"transform_config": {"R1": {}}}, "transform_config"),
        (changed(compressed_config("int-quantized", **W8A8), symmetric=False), "symmetric False"),
        (compressed_config("int-quantized", **W8A8) | {"quantization_status": "calibration"}, "'calibration'"),
    ],
)
def test_a_scheme_that_we_do_not_read_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, config: Any, words: str
) -> None:
    settings = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=words):
        read_facts(open_checkpoint(str(tmp_path)))


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ({"embeddings": "q8_0"}, "embeddings 'q8_0' .* supported: 'int8', 'int6', 'int5', 'int4'$"),
        ({"embeddings": "float"}, "embeddings 'float' "),
        ({"layers": {".*": "int8"}}, "must map at most 64 name patterns to int4 or int6"),
        ({"layers": {"a": ["int4"], ".*": "int4"}}, "must map at most 64 name patterns to int4 or int6"),
        ({"layers": {f"a{n}": "int4" for n in range(64)} | {".*": "int4"}}, "must map at most 64 name patterns"),
        ({"layers": {"(([a-z_.0-9])+)+!": "int4", ".*": "int4"}}, r"pattern .*\)\+!' .* supported: 'expressions of"),
        ({"layers": {".*.*.*.*.*x": "int4", ".*": "int4"}}, "pattern .* is not supported"),
        ({"layers": {"(": "int4", ".*": "int4"}}, r"pattern of layers in penstock_quantization '\(' "),
    ],
)
def test_a_recipe_that_we_do_not_write_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, hint: dict[str, Any], words: str
) -> None:
    settings = json.loads((tiny_llama / "config.json").read_text())
    config = compressed_config("pack-quantized", **GROUPS_OF_32)
    recipe = {"layers": {".*": "int4"}, "embeddings": "int5"} | hint
    settings |= {"quantization_config": config, HINT: recipe}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=words):
        read_facts(open_checkpoint(str(tmp_path)))


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("mlp.down_proj.g_idx", (torch.arange(256) // 128).flip(0).int(), r"down_proj\.g_idx in .*\(desc_act\)"),
        ("mlp.down_proj.qweight", torch.zeros(32, 128), r"down_proj\.qweight in .* has the type float32, not int32"),
        ("mlp.down_proj.scales", torch.full((2, 128), torch.nan), r"down_proj\.scales in .* not finite"),
        ("mlp.down_proj.qzeros", None, r"lack .*down_proj\.qzeros"),
        ("mlp.down_proj.qzeros", torch.zeros(2, 8, dtype=torch.int32), r"shape \[2, 8\]; .* \[2, 16\]"),
    ],
)
def test_a_damaged_tensor_is_named(tmp_path: Path, name: str, tensor: Tensor | None, words: str) -> None:
    write_int4(tmp_path, gptq, GPTQ_CONFIG)
    rewrite(tmp_path, f"model.layers.1.{name}", tensor)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_groups_that_the_kernels_do_not_have_are_refused(tmp_path: Path) -> None:
    write_int4(tmp_path, gptq, GPTQ_CONFIG | {"group_size": 16}, groups=8)
    with pytest.raises(CheckpointError, match=r"groups of 16 columns .* multiples of 32 columns"):
        load(tmp_path)


def test_a_shape_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    write_int4(tmp_path, packed_symmetric, compressed_config("pack-quantized", **GROUPED))
    rewrite(tmp_path, "model.layers.0.mlp.up_proj.weight_shape", torch.tensor([128, 256]))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_shape in .* is not \[256, 128\]"):
        load(tmp_path)
